"""Reading jobs from outside a task."""

from .client import Client

__all__ = ["Client"]
