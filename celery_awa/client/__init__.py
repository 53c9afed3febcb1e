"""Jobs from outside a task: reading them, and what operators ask of them."""

from .client import Client

__all__ = ["Client"]
