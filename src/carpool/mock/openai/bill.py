"""What the OpenAI mock charges: whole nano-dollars, summed in pico-dollars and rounded half to even, once."""

from carpool.mock.core.bill import Usage
from carpool.mock.openai.models import LONG_FROM, OpenAISpec
from carpool.mock.openai.providers import TABLE


def price_nano(spec: OpenAISpec, usage: Usage, tier: str = "default") -> int:
    """`usage.write_5m` are the tokens written to the cache; OpenAI has one price for all durations."""
    long = spec.long and usage.total_input > LONG_FROM
    habits = TABLE[spec.house]
    read = usage.read * spec.read
    if tier == "batch" and not habits.prices_cached_in_batches:
        read = read * 100 // habits.batch_percent
    prompt = usage.input * spec.input + read + usage.write_5m * (spec.write or 0)
    hundredths = (prompt * 2 if long else prompt) * 100 + usage.output * spec.output * (150 if long else 100)
    percent = _percent(spec, tier)
    whole, rest = divmod(hundredths * percent, 10_000_000)
    return whole + (rest > 5_000_000 or (rest == 5_000_000 and whole % 2))


def _percent(spec: OpenAISpec, tier: str) -> int:
    if tier == "batch":
        return TABLE[spec.house].batch_percent
    return 100 if tier == "default" else spec.tiers[tier]
