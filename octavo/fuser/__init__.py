"""Operations that run together: what one is, which fusions there are, and the container that finds them."""
