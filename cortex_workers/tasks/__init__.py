"""The Celery floor: the only room that knows Celery, kombu and Redis."""

if __name__ != "cortex_workers.tasks":
    raise ImportError(
        f"import cortex_workers.tasks, not {__name__}: the link at the top level is a door for people"
    )
