"""What runs beside the tasks: no Celery and no SQL in here."""
