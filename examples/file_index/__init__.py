"""The parts of ``examples/index_files.py``: the Celery app, its worker, two faults and a bar."""
