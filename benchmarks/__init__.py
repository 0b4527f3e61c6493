"""The same work on this project and on its peers, as ratios in one run.

::

    python -m nox -s bench                      # everything, in an environment of its own
    python -m nox -s bench -- --quick           # three minutes
    python -m benchmarks --only drain --on sqlite --sizes small    # where the peers are installed

`works` says what is measured, `contestants` how each one is used, `child` how a measurement is
taken (always in a process of its own, on a database of its own), `harness` in which order, and
`report` what it says about it. `profile_job` takes one job apart.
"""
