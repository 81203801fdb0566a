"""The forecast that the engines share: one state, replaced only by whoever has read it."""

from __future__ import annotations

from carpool.stores.operations.session import Session


def forecast(session: Session) -> tuple[int, bytes]:
    row = session.row("forecast")
    return (0, b"") if row is None else (row[0], row[1])


def save_forecast(session: Session, known: int, state: bytes) -> bool:
    return session.run("save_forecast", {"known": known, "state": state}).rowcount > 0
