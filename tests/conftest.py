import os

import jax

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
