"""The parts of ``examples/index_files.py``: the Celery app, its worker, three faults and a bar."""
