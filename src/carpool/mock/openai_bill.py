"""What the stand-in for OpenAI charges: whole nano-dollars, summed in pico-dollars and rounded half to even, once."""

from carpool.mock.bill import Usage
from carpool.mock.openai_models import LONG_FROM, OpenAISpec

_PERCENT = {"default": 100, "batch": 50}


def price_nano(spec: OpenAISpec, usage: Usage, tier: str = "default") -> int:
    """`usage.write_5m` are the tokens written to the cache; OpenAI tells no terms apart in their price."""
    long = spec.long and usage.total_input > LONG_FROM
    prompt = usage.input * spec.input + usage.read * spec.read + usage.write_5m * (spec.write or 0)
    hundredths = (prompt * 2 if long else prompt) * 100 + usage.output * spec.output * (150 if long else 100)
    percent = _PERCENT[tier] if tier in _PERCENT else spec.tiers[tier]
    whole, rest = divmod(hundredths * percent, 10_000_000)
    return whole + (rest > 5_000_000 or (rest == 5_000_000 and whole % 2))
