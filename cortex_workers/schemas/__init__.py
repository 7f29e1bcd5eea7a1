"""The vocabulary: every type that crosses a floor (pydantic and the standard library only)."""

if __name__ != "cortex_workers.schemas":
    raise ImportError(
        f"import cortex_workers.schemas, not {__name__}: the link at the top level is a door for people"
    )
