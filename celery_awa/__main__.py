"""``python -m celery_awa``."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="python -m celery_awa")
