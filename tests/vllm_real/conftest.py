"""Tests of the real vLLM run in its own environment (`make test-vllm`); elsewhere they are not collected.

The folder is not called `vllm`: libraries that look for a package of that name would find it.
"""

import os
from importlib.util import find_spec

# before anything imports vLLM
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
