"""Every knob, once: unit, default, environment name and reason.

A wrong value stops the start with the name of the variable and what is allowed. Secrets are never printed.
Source: decisions 11; rulings 18, 28; celery.md 32.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cortex_workers.errors import InvalidSettings

PREFIX = "CORTEX_"
_DATABASE_SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
_BROKER_SCHEMES = ("redis", "rediss", "sentinel", "amqp", "amqps")


class Settings(BaseSettings):
    """The configuration of one process; read from ``CORTEX_*``. Names end in their unit: _s seconds, _bytes bytes."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)
    NO_DEFAULTS_IN_PRODUCTION: ClassVar[tuple[str, ...]] = ("database_url", "broker_url")

    # Where things are
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL 14 or newer, postgresql://user:password@host:port/name. The rows.",
    )
    broker_url: SecretStr | None = Field(
        default=None, description="Redis, Valkey or RabbitMQ. It carries hints only; losing it costs latency."
    )
    host: str | None = Field(
        default=None, description="The host's agents and tools, module:attribute, like shop.agents:host."
    )
    scope: str | None = Field(
        default=None, description="The default scope of a Client or command, like tenant=acme."
    )
    actor: str | None = Field(
        default=None, description="Who decides when a command is used; default cli:<os user>."
    )
    data_dir: str = Field(
        default=".cortex",
        description="Folder of the embedded development servers; no production command uses it.",
    )

    # Leases
    lease_ttl_s: float = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="How long a run stays with a silent worker before others may take it.",
    )
    lease_renew_s: float = Field(
        default=20.0,
        ge=0.2,
        le=1200,
        description="One renewal statement per process and interval; a third of the ttl.",
    )
    lease_trust_s: float = Field(
        default=40.0,
        ge=0.5,
        le=3600,
        description="Without a confirmed renewal for this long, a worker starts no side effect. Below the ttl.",
    )
    reclaim_limit: int = Field(
        default=3,
        ge=0,
        le=100,
        description="A run that loses its worker more often than this in a row fails.",
    )

    # Sweeps and hints
    sweep_interval_s: float = Field(
        default=10.0, ge=0.2, le=3600, description="Beat's interval of sweep_expired."
    )
    sweep_page: int = Field(default=100, ge=1, le=1000, description="Rows a pass reads at once.")
    sweep_budget_s: float = Field(
        default=8.0, ge=0.1, le=600, description="A pass stops after this, the rest next time."
    )
    renotify_s: float = Field(
        default=300.0, ge=0, le=86_400, description="A waiting run is announced again this often; 0 = never."
    )
    heal_known_s: float = Field(
        default=3.0,
        ge=0.1,
        le=3600,
        description="A waiting run without a hint is announced after this, depth known.",
    )
    heal_unknown_s: float = Field(
        default=15.0, ge=0.1, le=3600, description="The same where the queue's depth is not known."
    )

    # Pauses
    suspension_ttl_s: float = Field(
        default=604_800.0,
        ge=0,
        le=31_536_000,
        description="Deadline of a pause without its own; 0 = none. 7 days.",
    )
    uncertain_settle_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="A negative lookup is believed this long (plus the tool's timeout) after the old lease's expiry.",
    )
    uncertain_settle_no_timeout_s: float = Field(
        default=600.0, ge=0, le=86_400, description="The same for a tool without a timeout."
    )

    # Running
    slots: int = Field(
        default=200, ge=1, le=5000, description="Runs a worker process executes at once (threads)."
    )
    pool: str = Field(
        default="main", pattern=r"^[a-z0-9_-]{1,40}$", description="The set of workers it belongs to."
    )
    queue_prefix: str = Field(
        default="cw", pattern=r"^[a-z0-9_-]{1,20}$", description="Prefix of the queue names."
    )
    slice_s: float = Field(
        default=300.0, ge=0.1, le=3600, description="A task works this long at most, then goes on."
    )
    slice_steps: int = Field(default=25, ge=1, le=10_000, description="A task takes this many steps at most.")
    table_claim_s: float = Field(
        default=10.0,
        ge=0,
        le=300,
        description="How long a slot takes runs from the table before it asks Celery again.",
    )
    claim_batch: int = Field(
        default=8, ge=1, le=32, description="Rows claimed at once while runs are short (unshared)."
    )
    drain_s: float = Field(
        default=60.0, ge=0.5, le=3600, description="After SIGTERM, what still runs is handed off."
    )
    phase_commit_s: float = Field(
        default=2.0, ge=0, le=60, description="Results of a tool phase longer than this are stored at once."
    )
    tool_timeout_s: float | None = Field(
        default=None, gt=0, le=86_400, description="Timeout of a tool without its own; none by default."
    )
    abandoned_tools_max: int = Field(
        default=50,
        ge=1,
        le=1000,
        description="Tool threads left behind by timeouts before the process drains itself.",
    )
    model_timeout_s: float = Field(default=300.0, gt=0, le=3600, description="Total time of one model call.")
    model_attempts: int = Field(default=4, ge=1, le=20, description="Tries of one model call within a step.")
    model_backoff_s: float = Field(
        default=1.0, ge=0, le=60, description="First pause between two tries; doubles."
    )
    model_wait_max_s: float = Field(
        default=30.0,
        ge=0,
        le=600,
        description="A provider that asks for a longer pause gets the run back later.",
    )
    history_window: int = Field(
        default=100, ge=0, le=10_000, description="Newest messages of the session a run reads."
    )

    # Messages between agents
    hop_ceiling: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="Messages a conversation takes, and how deep agents may set one another to work.",
    )
    reply_by_s: float = Field(
        default=300.0,
        ge=1,
        le=604_800,
        description="How long an asking agent waits, unless the receiver or the question says otherwise.",
    )
    reply_grace_s: float = Field(
        default=300.0,
        ge=0,
        le=86_400,
        description="After that the run itself ends; two sweep intervals at least, or its model may never hear of it.",
    )
    messages_per_run: int = Field(default=32, ge=1, le=10_000, description="Messages that one run may send.")
    delivery_lease_s: float = Field(
        default=60.0, ge=1, le=3600, description="How long one call to a peer or a hand-off handler may take."
    )
    delivery_attempts: int = Field(
        default=5, ge=1, le=100, description="Calls of one delivery before it counts as failed."
    )

    # Sizes
    message_bytes: int = Field(
        default=1_048_576,
        ge=256,
        le=4_194_304,
        description="Largest message between agents; longer replies are cut. 1 MiB.",
    )
    input_bytes: int = Field(
        default=8_388_608, ge=1024, le=67_108_864, description="Largest input, encoded. 8 MiB."
    )
    result_bytes: int = Field(
        default=1_048_576, ge=256, le=8_388_608, description="Longer tool results are cut. 1 MiB."
    )

    # Database
    db_pool: int = Field(
        default=20, ge=2, le=500, description="Connections a worker process may use for work."
    )
    db_lease_pool: int = Field(default=2, ge=1, le=10, description="Connections kept for renewals and drain.")
    db_prepare: bool = Field(
        default=False, description="Prepared statements; only for direct connections, never behind a pooler."
    )
    db_connect_timeout_s: int = Field(default=5, ge=1, le=60, description="Time to reach Postgres.")
    db_statement_timeout_s: float = Field(default=15.0, ge=0.1, le=600, description="Longest statement.")
    db_lock_timeout_s: float = Field(default=3.0, ge=0.1, le=600, description="Longest wait for a row lock.")

    # Broker
    visibility_timeout_s: int = Field(
        default=1800,
        ge=60,
        le=86_400,
        description="Redis: unacknowledged messages return; two slices must fit.",
    )
    publish_queue: int = Field(
        default=10_000, ge=10, le=1_000_000, description="Hints waiting to be sent; oldest dropped."
    )
    breaker_s: float = Field(
        default=10.0, ge=0.1, le=600, description="Publishing pauses this long after a failure."
    )

    # Observability
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto = console on a terminal, else one JSON object a line."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level logged."
    )
    metrics_port: int | None = Field(
        default=None, ge=1, le=65_535, description="Prometheus page of a worker; off."
    )

    @field_validator("database_url", "broker_url")
    @classmethod
    def _url(cls, value: SecretStr | None, info: Any) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        scheme = value.get_secret_value().split("://", 1)[0]
        allowed = _DATABASE_SCHEMES if info.field_name == "database_url" else _BROKER_SCHEMES
        if "://" not in value.get_secret_value() or scheme not in allowed:
            raise ValueError(f"must be a URL that starts with one of {', '.join(allowed)}")
        return value

    @model_validator(mode="after")
    def _relations(self) -> Settings:
        if self.lease_renew_s * 2 > self.lease_ttl_s:
            raise ValueError("lease_renew_s must be at most half of lease_ttl_s (a third is usual)")
        if not self.lease_renew_s < self.lease_trust_s < self.lease_ttl_s:
            raise ValueError("lease_trust_s must lie between lease_renew_s and lease_ttl_s")
        if (self.slice_s + self.model_timeout_s) * 2 > self.visibility_timeout_s:
            raise ValueError("slice_s plus model_timeout_s must stay under half of visibility_timeout_s")
        return self

    def require_database(self) -> str:
        """The database URL for a production command.

        Raises: InvalidSettings naming the variable when it is not set.
        """
        if self.database_url is None:
            raise InvalidSettings(
                f"{PREFIX}DATABASE_URL is not set; it names the PostgreSQL database of the fleet"
            )
        return self.database_url.get_secret_value()

    def require_broker(self) -> str:
        """The broker URL for a production command.

        Raises: InvalidSettings naming the variable when it is not set.
        """
        if self.broker_url is None:
            raise InvalidSettings(
                f"{PREFIX}BROKER_URL is not set; it names the Redis or RabbitMQ that carries hints"
            )
        return self.broker_url.get_secret_value()

    @property
    def queue_continue(self) -> str:
        """The queue of runs that never began."""
        return self.queue_for("continue")

    def queue_for(self, kind: str, pool: str | None = None) -> str:
        """The name of a queue: prefix, kind, and the pool unless it is main."""
        chosen = pool or self.pool
        base = f"{self.queue_prefix}.{kind}"
        return base if chosen == "main" or kind == "sweep" else f"{base}.{chosen}"


def mask_url(url: str) -> str:
    """A URL for people to read: the password is replaced by stars."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    netloc = parts.netloc.replace(f":{parts.password}@", ":***@")
    return urlunsplit(parts._replace(netloc=netloc))


def load_settings(**overrides: Any) -> Settings:
    """Read the settings from the environment; keyword arguments win.

    Raises: InvalidSettings with every wrong variable, what is allowed, and never a secret's value.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise InvalidSettings(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_input=False, include_url=False):
        name = "_".join(str(part) for part in item["loc"]).upper()
        message = item["msg"].removeprefix("Value error, ")
        field = Settings.model_fields.get(str(item["loc"][0]) if item["loc"] else "")
        hint = f" ({field.description})" if field is not None else ""
        lines.append(f"{PREFIX}{name}: {message}{hint}" if name else f"settings: {message}")
    return "; ".join(lines)
