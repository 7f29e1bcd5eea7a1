"""Writes what documentation repeats of the code, so that it cannot disagree with it.

``python -m cortex_workers.docs`` rewrites every generated block of the checkout's Markdown; ``--check`` only compares.
"""
