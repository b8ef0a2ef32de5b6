"""What holds for every test process: tests fork from it, and a pool of threads does not survive a fork."""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
