"""Rules give a call the options that its client did not: a budget, a lane, tags, or a bound on what may be asked.

`facts` is what can be known of a request, `conditions` what a rule may want of it, `deciding` which rule wins and what
it does, `reading` how rules are written in a file. All of it is pure: the time is handed in.
"""

from carpool.rules.deciding import Rule, RuleBook, Ruling, Verdict, decide
from carpool.rules.facts import Facts, is_subagent
from carpool.rules.reading import read_rules

__all__ = ["Facts", "Rule", "RuleBook", "Ruling", "Verdict", "decide", "is_subagent", "read_rules"]
