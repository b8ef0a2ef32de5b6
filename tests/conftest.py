"""Settings of every test process: tests fork from it, and a pool of threads does not survive a
fork.
"""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Threads that wait for each other cost several times what these small tensors do, the more so
# with another worker.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.support import patience

pytest_runtest_protocol = patience.pytest_runtest_protocol
patience.hypotheses_take_their_time()
