"""The drain switch: one byte that threads and forked children see, set where nothing may block."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from cortex_workers.lease.drain import DrainSwitch
from cortex_workers.lease.identity import worker_id
from tests.waiting import DEADLINE_S, wait_until

FORKED = """
import os, sys
from cortex_workers.lease.drain import DrainSwitch

switch = DrainSwitch()
switch.on_drain(lambda: print("heard by", "parent" if os.getpid() == parent else "child", flush=True))
parent = os.getpid()
go, went = os.pipe()
child = os.fork()
if child == 0:
    assert not switch.is_set()
    os.write(went, b"x")
    switch.on_drain(lambda: os._exit(7))
    switch.wait(60)
    os._exit(1 if not switch.is_set() else 7)
os.read(go, 1)
switch.set()
sys.exit(0 if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and switch.wait(60) else 1)
"""

FROM_A_HANDLER = """
import os, signal, threading
from cortex_workers.lease.drain import DrainSwitch

switch = DrainSwitch()
signal.signal(signal.SIGTERM, lambda *_: switch.set())
event = switch.event
# The handler runs in this thread while it holds the very locks of the event.
with event._cond:
    os.kill(os.getpid(), signal.SIGTERM)
    assert switch.is_set()
assert event.wait(60)
"""

IDENTITY = """
import os
from cortex_workers.lease.identity import worker_id

mine = worker_id()
read, write = os.pipe()
if os.fork() == 0:
    assert worker_id() == worker_id()
    os.write(write, worker_id().encode())
    os._exit(0)
os.wait()
theirs = os.read(read, 1000).decode()
assert worker_id() == mine
assert theirs != mine and theirs.split(":")[1] != mine.split(":")[1] and theirs.split(":")[2] != mine.split(":")[2]
"""


def run(script: str) -> str:
    """Run a script in a process of its own: a fork of this one would copy its threads' locks."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_forked_child_sees_what_its_parent_sets() -> None:
    run(FORKED)


def test_a_signal_handler_may_set_it_whatever_the_thread_is_doing() -> None:
    run(FROM_A_HANDLER)


def test_threads_can_wait_for_it() -> None:
    switch = DrainSwitch()
    assert not switch.wait(0.01)
    waiting = threading.Thread(target=switch.wait)
    waiting.start()
    switch.set()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert switch.event.is_set()


def test_everybody_who_asked_is_called_once() -> None:
    switch = DrainSwitch()
    told: list[str] = []
    switch.on_drain(lambda: told.append("first"))
    switch.on_drain(lambda: told.append("second"))
    switch.set()
    switch.set()
    wait_until(lambda: len(told) == 2, what="both calls")
    switch.on_drain(lambda: told.append("late"))
    wait_until(lambda: len(told) == 3, what="the call of who came late")
    assert sorted(told) == ["first", "late", "second"]


def test_a_callback_that_fails_costs_nobody_the_call() -> None:
    switch = DrainSwitch()
    called = threading.Event()

    def fail() -> None:
        raise ValueError("a bug of somebody else")

    switch.on_drain(fail)
    switch.on_drain(called.set)
    switch.set()
    assert called.wait(DEADLINE_S)


def test_a_process_keeps_its_name_and_a_fork_gets_another() -> None:
    run(IDENTITY)


def test_the_name_is_readable_and_the_same_in_every_thread() -> None:
    names: set[str] = set()
    threads = [threading.Thread(target=lambda: names.add(worker_id())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (name,) = names
    host, pid, boot = name.split(":")
    assert host
    assert pid.isdigit()
    assert len(boot) == 8
