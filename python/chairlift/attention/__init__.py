"""Attention over pages: the backends, and what can be had here."""

from chairlift.attention.choice import Backend, BackendInfo, available_backends, choose_backend

__all__ = ["Backend", "BackendInfo", "available_backends", "choose_backend"]
