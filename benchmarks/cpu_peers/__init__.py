"""The engines that people use on CPUs, measured beside specjax: the suite ``cpu-peers``.

``engine.py`` states what an engine can do and which engines there are; each engine has one file.
``measure.py`` is the kind of row: it starts each engine in a process of its own (``child.py``,
``children.py``), measures them in turn, and keeps a turn only if nothing else ran (``load.py``).
"""
