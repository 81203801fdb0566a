"""The lane `now`: synchronous purchases, rate gates, flex, relayed answers."""
