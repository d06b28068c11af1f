"""What is around a run: its options, the tasks as they are read, the record of it, its statistics, all that is shown.

`rl_eval.py` is the story of running rollouts and imports from here what is not. `python3 -m report --help` lists what
can be made of a finished run's file. Nothing here knows a deployment.
"""
