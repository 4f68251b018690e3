"""Shapes as ``Engine(buckets=...)`` takes them."""

from __future__ import annotations

from jpets.engine.batch.bucket import Bucket, parse_bucket, steady_menu

__all__ = ["Bucket", "parse_bucket", "steady_menu"]
"""``steady_menu`` is what the policy ``steady`` wants."""
