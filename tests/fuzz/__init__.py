"""Random cases against an oracle in numpy that shares no code with Octavo.

python -m tests.fuzz linear 17                  one case, printed before it runs
python -m tests.fuzz grouped 0 5000             a range of seeds
python -m tests.fuzz linear 0 500 --device cuda --nonfinite
"""
