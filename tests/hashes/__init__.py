"""Hashes of everything a layer computes, so that a change of structure can show that it changed no bits.

    python -m tests.hashes                  run every case, print what differs from the record; exit 1 on a difference
    python -m tests.hashes --only PATTERN   only cases whose names contain PATTERN, or match it as a glob
    python -m tests.hashes --eager          eager mode alone: a minute
    python -m tests.hashes --write          rewrite the record, or with --only those cases of it
    python -m tests.hashes --device cuda    the same on a GPU, against a record of its own

values.py makes inputs, cases.py lists cases, models.py builds their modules, play.py runs and hashes one, record.py
compares. Only the public API of octavo is used, so that no move of an internal module reaches this package.
"""
