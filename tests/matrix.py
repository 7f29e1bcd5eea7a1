"""Run what depends on it against another PostgreSQL, Redis and RabbitMQ than the embedded ones.

`python -m tests.matrix`, or `make test-matrix`. Each service is looked for where it usually listens, or where its
variable says. One that is not there is skipped, and said so on the last lines.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import kombu
import psycopg
import redis

from tests.servers import BROKER_VARIABLE, DATABASE_VARIABLE

_NO_TESTS = 5  # pytest's exit code when nothing was selected


@dataclass(frozen=True)
class Service:
    """Another server, how to look for it, and which tests ask about it."""

    name: str
    variable: str
    usual_address: str
    version: Callable[[str], str]
    given_as: str
    selection: str

    @property
    def address(self) -> str:
        """Where the service is looked for."""
        return os.environ.get(self.variable, self.usual_address)


def postgres_version(address: str) -> str:
    """Ask for the version, as a user who may make databases: each test makes its own."""
    with psycopg.connect(address, connect_timeout=3) as connection:
        row = connection.execute(
            "SELECT current_setting('server_version'), rolcreatedb FROM pg_roles WHERE rolname = current_user"
        ).fetchone()
    if row is None or not row[1]:
        raise PermissionError("the user there may not create databases")
    return str(row[0])


def redis_version(address: str) -> str:
    """Ask for the version."""
    with redis.Redis.from_url(address, socket_connect_timeout=3, socket_timeout=3) as connection:
        return str(connection.info("server")["redis_version"])


def rabbitmq_version(address: str) -> str:
    """Ask for the version."""
    with kombu.Connection(address, connect_timeout=3) as connection:
        connection.ensure_connection(max_retries=1, timeout=3)
        return str(connection.connection.server_properties["version"])


SERVICES = (
    Service(
        "PostgreSQL",
        "CORTEX_MATRIX_POSTGRES_URL",
        "postgresql://postgres@127.0.0.1:5432/postgres",
        postgres_version,
        DATABASE_VARIABLE,
        "contract or (matrix and not fleet)",
    ),
    Service(
        "Redis",
        "CORTEX_MATRIX_REDIS_URL",
        "redis://127.0.0.1:6379/0",
        redis_version,
        BROKER_VARIABLE,
        "matrix",
    ),
    Service(
        "RabbitMQ",
        "CORTEX_MATRIX_RABBITMQ_URL",
        "amqp://guest:guest@127.0.0.1:5672//",
        rabbitmq_version,
        BROKER_VARIABLE,
        "matrix",
    ),
)


def main() -> int:
    """Run the tests of each service that is there; the worst exit code is ours."""
    verdicts = [run(service) for service in SERVICES]
    print()
    for line, _ in verdicts:
        print(line)
    return max(code for _, code in verdicts)


def run(service: Service) -> tuple[str, int]:
    """Run the tests of one service and return what to say about it, and the exit code."""
    try:
        version = service.version(service.address)
    except (psycopg.Error, redis.RedisError, OSError, kombu.exceptions.OperationalError) as error:
        reason = str(error).strip().splitlines()[0]
        return f"SKIPPED {service.name}: not usable at the address of {service.variable} ({reason})", 0
    print(f"\n== {service.name} {version}", flush=True)
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", f"({service.selection}) and not soak", *sys.argv[1:], "tests"],
        env=os.environ | {service.given_as: service.address},
        check=False,
    ).returncode
    if code == _NO_TESTS:
        return f"SKIPPED {service.name} {version}: no test asks for it", 0
    return f"{'FAILED ' if code else 'PASSED '} {service.name} {version}", code


if __name__ == "__main__":
    sys.exit(main())
