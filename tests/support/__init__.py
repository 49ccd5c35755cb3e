"""What several test files share: layers and models to try, steps of them, comparisons, counters and processes."""
