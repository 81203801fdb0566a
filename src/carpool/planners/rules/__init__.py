"""Rules add options that a client did not set: a budget, a lane, tags, or a limit on what a client may ask for.

`conditions` holds the facts about a request and the tests on them, `decide` picks the rule and applies it, `parse`
reads rules from a config. All of it is pure: the caller passes the time.
"""

from carpool.planners.rules.conditions import Facts, is_subagent
from carpool.planners.rules.decide import Rule, RuleBook, Ruling, Verdict, decide
from carpool.planners.rules.parse import read_rules

__all__ = ["Facts", "Rule", "RuleBook", "Ruling", "Verdict", "decide", "is_subagent", "read_rules"]
