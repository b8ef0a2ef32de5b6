"""Variables that the jobs of `render` set, and `world.launchers` reads, for schedulers that number
machines in no way of their own. Each machine has one process, which starts its ranks.
"""

MACHINE = "MTRAIN_MACHINE"
"""The number of this machine, from 0."""
MACHINES = "MTRAIN_MACHINES"
"""The number of machines."""
JOB = "MTRAIN_JOB"
"""The name of the job, which all of its restarts keep."""
