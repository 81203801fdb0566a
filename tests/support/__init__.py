"""What the tests share: servers, clients, stores, cases. Nothing in here is collected as a test."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
