"""The library frontends: `FleetDispatcher`, `Fleet`, `carpool.transport()`."""
