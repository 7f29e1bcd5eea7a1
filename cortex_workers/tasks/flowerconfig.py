"""Flower's settings, a file for its `--conf`; as a program it prints where it lies (see deploy/README.md).

Flower shows workers, queues and tasks, with ids only; a run's story is `cortex-workers runs show`. What is not set
here can be given as ``FLOWER_…`` in the environment: FLOWER_BASIC_AUTH=user:password, FLOWER_URL_PREFIX,
FLOWER_COOKIE_SECRET.
"""

import os
import sys

if __name__ == "__main__":
    sys.stdout.write(f"{__file__}\n")
    raise SystemExit

# Seen from this machine only, unless somebody says otherwise and gives a login with it.
address = os.environ.get("FLOWER_ADDRESS", "127.0.0.1")
port = int(os.environ.get("FLOWER_PORT", "5555"))
if address not in ("127.0.0.1", "::1", "localhost") and not (
    os.environ.get("FLOWER_BASIC_AUTH") or os.environ.get("FLOWER_AUTH")
):
    raise SystemExit(
        f"Flower would be open to the network on {address!r} without a login: set FLOWER_BASIC_AUTH=user:password"
    )

# Looking only: a revoke, a purge or a shutdown from a browser is not how this fleet is run (see deploy/README.md).
read_only = True

# The default of 100,000 tasks is memory for nothing; the rows know what happened.
max_tasks = 20_000

# Workers of an old deploy leave the list, and their series the metrics.
purge_offline_workers = 600

# The file behind it is a pickle: whoever can write it runs code in Flower. Nothing is lost by starting empty.
persistent = False

# Behind an ingress the caller's address and scheme are in these headers.
xheaders = True

# A task lasts milliseconds, or a slice of five minutes and a model call.
task_runtime_metric_buckets = [0.1, 1.0, 5.0, 15.0, 60.0, 180.0, 300.0, 600.0, float("inf")]

# The run's id is in `kwargs`, what became of it in `result`.
tasks_columns = "name,uuid,state,kwargs,result,received,runtime,worker"
