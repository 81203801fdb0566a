"""Pure planners: a snapshot and the time in, a plan out. No I/O, no clock."""
