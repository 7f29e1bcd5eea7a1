"""Our processes as nodes of pytest-celery: its clusters drive them, and no container engine is asked."""

from pytest_celery import CeleryTestCluster, CeleryTestWorker

from cortex_workers.settings import Settings
from cortex_workers.tasks.app import make_app
from cortex_workers.testing.fleet import WorkerProcess
from tests.fleet.bench import Bench, call, say


def node(bench: Bench) -> CeleryTestWorker:
    app = make_app(Settings(database_url=bench.database_url, broker_url=bench.broker_url))
    worker = WorkerProcess(bench.folder, bench.environment, "-c", "4")
    return CeleryTestWorker(bench.start(worker, ready=False), app)


def test_a_cluster_drives_workers_through_kill_and_restart(bench: Bench) -> None:
    cluster = CeleryTestCluster(node(bench), node(bench))
    assert cluster.ready()
    assert cluster.config()["urls"] == [bench.broker_url] * 2
    first, second = cluster

    with bench.gate():
        run = bench.enqueue(call("charge", amount=1), call("wait_at", gate="gate"), say())
        bench.entered()
        holder, other = (first, second) if bench.held_by(first.container) else (second, first)
        holder.kill()
        assert (holder.container.status, other.container.status) == ("exited", "running")
        bench.entered(count=2)
    (row,) = bench.completed(run)
    assert row["reclaim_total"] == 1
    other.assert_log_exists("cortex.continue_run")

    holder.restart()
    other.kill(signal="SIGTERM")
    assert other.container.wait() == 0
    assert holder.ready() and holder.hostname().startswith(holder.worker_name)
    bench.completed(bench.enqueue(call("charge", amount=2), say()))
    assert bench.did() == {"charge": 2}
