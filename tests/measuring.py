"""Stand-ins for the GPU benchmark's measuring process; without torch: they start at once."""

import os
import time


def prepare(device, scale):
    """What the process says of its machine."""
    return {"name": f"{device} {scale}"}


def measure(name):
    """Measure at once, but for figures whose names say what becomes of them."""
    if name == "dies":
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    status = {"status": "failed", "reason": "bad"} if name == "fails" else {"status": "measured"}
    return status | {"process": os.getpid()}
