"""Where celery-awa meets Celery: the task base, the worker step, the signals, the messages."""
