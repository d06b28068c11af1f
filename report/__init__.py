"""What is shown of a run: progress while it runs, tables, comparisons, files for CI systems, a page to read.

It reads what `rl_eval.py` writes and computes nothing of its own that the script computes: statistics are the
script's. `python3 -m report --help` lists what can be made of a finished run's file. It knows no deployment.
"""
