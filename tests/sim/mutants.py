"""Named one-line bugs, each of which must be noticed: by the simulation within 200 worlds, or by a named test.

`make mutants` breaks a copy of the tree in each of these ways. A bug that nobody notices is a hole in the net: mend the
checks, not the list. `make mutants ARGS="--only settle"` tries those whose name contains the word.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

SEEDS = 200
PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str | None = None  # who notices it, where the simulation can't


ENGINE = "src/carpool/engine"
SQL = "src/carpool/stores/sql"
ADMITTED = "tests/engine/batch/test_admit.py"
LOST = "tests/engine/batch/test_follow.py"
PRESSED = "tests/frontends/proxy/test_pressure.py"
PROXY = "src/carpool/frontends/proxy"
LIMITS = "tests/frontends/proxy/http/test_bounds.py::{}"
CUT = "tests/frontends/proxy/test_cut_answers.py"
WORLDS = "tests/sim/test_openai_worlds.py::{}"
LEARNED = "tests/engine/test_learning.py"
MUTANTS = (
    Mutant(
        "the turns that come get no time of their task",
        "src/carpool/planners/tasks.py",
        "deadline - turns_left * seconds_per_turn - margin",
        "deadline - margin",
        "tests/planners/test_tasks.py",
    ),
    Mutant(
        "a task comes back from now",
        "src/carpool/planners/tasks.py",
        "        if not task.left and until <= soonest:\n            task.left = True\n",
        "        task.left = until <= soonest\n        if task.left:\n",
        "tests/planners/test_tasks.py",
    ),
    Mutant(
        "the deadline of a task is known to one process only",
        "src/carpool/engine/tasks.py",
        "                await self._merge([task])\n",
        "                pass\n",
        "tests/engine/test_tasks.py",
    ),
    Mutant(
        "a batch in flight teaches the forecast nothing before it ends",
        "src/carpool/planners/forecast/forecast.py",
        "        self._learn(of, from_age, to_age, now, ended=False)\n",
        "        return\n",
        test="tests/planners/forecast/test_forecast.py::test_stuck_batches_count_before_anything_ends",
    ),
    Mutant(
        "a promise allows what synchronous calls take, without a margin",
        "src/carpool/planners/forecast/forecast.py",
        "self._sync_quantile(provider, model, str(place), SYNC_QUANTILE))",
        "self._sync_quantile(provider, model, str(place), SYNC_QUANTILE)) / SYNC_MARGIN",
        test="tests/planners/forecast/test_forecast.py::test_the_margin_holds_while_the_provider_is_slow",
    ),
    Mutant(
        "a batch that was cancelled counts as ended",
        f"{ENGINE}/learning.py",
        "if batch.id in self._cancelled or batch.note:",
        "if batch.note:",
        test=f"{LEARNED}::test_a_cancelled_batch_counts_up_to_the_request",
    ),
    Mutant(
        "what was learned is added to the store again at every save",
        f"{ENGINE}/learning.py",
        "            self._forecast.saved()\n",
        "            pass\n",
        test=f"{LEARNED}::test_it_is_saved_a_minute_after_something_was_learned",
    ),
    Mutant(
        "who leaves is still waited for",
        f"{ENGINE}/batch/admit.py",
        "            await context.store.stop_awaiting(ticket, context.name)\n",
        "",
    ),
    Mutant(
        "an answer that was lost is written down as delivered",
        f"{ENGINE}/batch/admit.py",
        "or self._due.pop(ticket, None)",
        "or self._due.get(ticket)",
    ),
    Mutant(
        "a delivery is on disk sooner because another one is about to be",
        f"{ENGINE}/batch/admit.py",
        "            self._due, self._pending = self._pending, {}\n"
        "            await self._context.clock.sleep(WRITE_S)\n",
        "            await self._context.clock.sleep(WRITE_S)\n"
        "            self._due, self._pending = self._pending, {}\n",
        test=f"{ADMITTED}::test_a_delivery_can_be_taken_back_for_a_while_even_if_others_are_about_to_be_written",
    ),
    Mutant(
        "an answer that is handed over again is written as soon as the first time",
        f"{ENGINE}/batch/admit.py",
        "        self._due.pop(ticket, None)  # delivered again,",
        "        # delivered again,",
        test=f"{ADMITTED}::test_a_repeated_delivery_can_be_taken_back_for_as_long_as_a_first",
    ),
    Mutant(
        "who comes back at once is taken for another",
        f"{ENGINE}/batch/admit.py",
        "waits = pending_call.fingerprint in self._leaving or (first and self._may_be_early(admission))",
        "waits = False",
        test=CUT,
    ),
    Mutant(
        "who left undecided is let in",
        f"{ENGINE}/batch/admit.py",
        "            if pending_call.left:\n                self._reject",
        "            if False:\n                self._reject",
        test="tests/engine/batch/test_admit.py",
    ),
    Mutant(
        "who is cancelled in the moment of its answer does not leave it",
        f"{ENGINE}/engine.py",
        "came in the same moment\n            self.tickets.leave(pending_call)",
        "came in the same moment\n            pending_call.answer.done() or self.tickets.leave(pending_call)",
        test="tests/engine/batch/test_admit.py",
    ),
    Mutant(
        "who releases a ticket releases another engine's",
        f"{SQL}/calls.sql",
        "UPDATE calls SET awaiter = NULL WHERE id = ? AND awaiter = ?",
        "UPDATE calls SET awaiter = NULL WHERE id = ? AND ? <> ''",
        test="tests/contract/test_store_calls.py",
    ),
    Mutant(
        "an answer that its client never received is delivered",
        f"{PROXY}/waiting.py",
        "            if not received:\n                self._engine.tickets.leave(pending_call)",
        "            if not received:\n                self._engine.deliveries.add(pending_call.ticket)",
        test=CUT,
    ),
    Mutant(
        "what the kernel took is received",
        f"{PROXY}/http/liveness.py",
        "return self._transport.get_write_buffer_size() + _unacknowledged(",
        "return 0 and _unacknowledged(",
        test=CUT,
    ),
    Mutant(
        "a reset right behind an answer is not heard",
        f"{PROXY}/http/liveness.py",
        "if error is not None and lost is not None:",
        "if False:",
        test=CUT,
    ),
    Mutant(
        "who hangs up on a call that it came for by its ticket keeps it from its client",
        f"{ENGINE}/batch/admit.py",
        "if not row.awaited and row.ticket not in self._context.waiters:",
        "if False:",
        test=CUT,
    ),
    Mutant(
        "a 5xx on create is taken for a refusal",
        f"{ENGINE}/batch/buy.py",
        "(status < 500 and status != 408)",
        "status != 408",
    ),
    Mutant(
        "a cut create is taken for one never sent",
        f"{ENGINE}/batch/buy.py",
        "        except NotConnected as error:",
        "        except WireError as error:",
    ),
    Mutant(
        "the lease is not checked before the bytes go out",
        f"{ENGINE}/batch/buy.py",
        "return await context.store.still_mine(",
        "return True or await context.store.still_mine(",
        test="tests/engine/batch/test_buy.py",
    ),
    Mutant(
        "whoever does not lead makes batches too",
        "src/carpool/stores/operations/batches.py",
        'if intent.account is not None and session.row("leads", leading) is None:',
        "if False:",
        test="tests/contract/test_store_leading.py",
    ),
    Mutant(
        "every engine rescues what others await",
        f"{ENGINE}/batch/rescue.py",
        "return call.awaiter is None or call.awaiter == self._context.name",
        "return True",
        test="tests/engine/cluster/test_membership.py",
    ),
    Mutant(
        "who was taken for dead forgets its clients",
        f"{ENGINE}/cluster/membership.py",
        "        await self._reawait_tickets()\n",
        "",
        test="tests/engine/cluster/test_membership.py",
    ),
    Mutant(
        "who was taken for dead goes on with another's batch",
        f"{ENGINE}/batch/api.py",
        "store.move(batch.id, target, owner=self._context.name, **changes)",
        "store.move(batch.id, target, **changes)",
        test="tests/sim/test_seeds.py",
    ),
    Mutant(
        "a create on its way is forgotten at a takeover",
        f"{SQL}/batches.sql",
        "state = CASE WHEN state = 'submitting' AND NOT unsent THEN 'unknown' ELSE state END",
        "state = CASE WHEN state = 'submitting' AND NOT unsent THEN 'refused' ELSE state END",
    ),
    Mutant(
        "a ticket is settled twice",
        "src/carpool/stores/operations/ledger.py",
        "call is not None and call.state != TicketState.SETTLED",
        "call is not None",
    ),
    Mutant(
        "betas are not part of the pool",
        "src/carpool/planners/routing.py",
        "headers=call.headers",
        "headers=call.headers[-1:]",
    ),
    Mutant(
        "a credential is not part of the pool",
        "src/carpool/planners/routing.py",
        "credential=call.payer or call.credential",
        'credential=_FIRST.setdefault("", call.payer or call.credential)',
    ),
    Mutant(
        "a missing line is lost",
        f"{ENGINE}/batch/collect.py",
        """await self.settle_unmentioned(batch, "the provider's results do not mention it")""",
        "Counter[Lane | None]()",
    ),
    Mutant(
        "what a piece brings beyond a chunk is lost",
        f"{ENGINE}/batch/collect.py",
        "chunk, size = chunk[CHUNK:], 0",
        "chunk, size = [], 0",
        test="tests/engine/batch/test_collect.py",
    ),
    Mutant(
        "who looks often holds up who brings answers home",
        f"{ENGINE}/batch/api.py",
        "        async with self._lines[context.keyring.account(credential)]:\n",
        "        if True:\n",
        test="tests/engine/batch/test_api.py",
    ),
    Mutant(
        "a refused rescue is the last word while a batch still carries the call",
        f"{ENGINE}/now/send.py",
        "if not whole_response.ok:",
        "if False:",
        test="tests/engine/batch/test_rescue.py",
    ),
    Mutant(
        "nobody looks for the answer of a call whose rescue was refused",
        f"{ENGINE}/batch/rescue.py",
        "if sent is Sent.LEFT and batch is not None",
        "if sent is Sent.TAKEN and batch is not None",
        test="tests/engine/batch/test_rescue.py",
    ),
    Mutant(
        "a batch that is all that can answer is looked at once only",
        f"{ENGINE}/batch/rescue.py",
        "self._urgent_polls[batch] = now + URGENT_POLL_S, until",
        "self._urgent_polls[batch] = until, until",
        test="tests/engine/batch/test_rescue.py",
    ),
    Mutant(
        "a store in trouble forgets a call whose rescue was refused",
        f"{ENGINE}/now/send.py",
        '            await self._context.retry_write("writing off a purchase", lambda: '
        "self._context.store.record(free))\n",
        "            await self._context.store.record(free)\n",
        test="tests/engine/batch/test_rescue.py",
    ),
    Mutant(
        "a call on disk waits for its turn beyond its deadline",
        f"{ENGINE}/now/gate.py",
        "if kept and not tried:",
        "if kept:",
        test="tests/engine/batch/test_rescue.py",
    ),
    Mutant(
        "results that failed often are never in a hurry",
        f"{ENGINE}/batch/collect.py",
        "min(self._retry_at[batch.id], self._context.now() + RETRY_S)",
        "self._retry_at[batch.id]",
        test="tests/engine/batch/test_rescue.py",
    ),
    Mutant(
        "a mistake is taken for the provider's trouble",
        "src/carpool/dialects/anthropic/errors.py",
        '"invalid_request_error": 400,',
        '"invalid_request_error": 500,',
    ),
    Mutant(
        "a suspect is cancelled",
        f"{ENGINE}/batch/follow.py",
        '            await context.store.suspect(batch.id, provider_id, "watched")\n',
        '            await context.store.suspect(batch.id, provider_id, "watched")\n'
        "            await upstream.ask(upstream.dialect.cancel(batch.key.headers, provider_id), "
        "context.keyring.secret(batch.key.credential), timeout=60)\n",
    ),
    Mutant(
        "a second answer has no line in the ledger",
        "src/carpool/stores/operations/ledger.py",
        "        if entry is not None:\n            late",
        "        if entry is not None and won:\n            late",
    ),
    Mutant(
        "a line is billed anew whenever it is read",
        "src/carpool/stores/operations/ledger.py",
        "        identity = (entry.ticket, entry.purchase)\n",
        "        entry = replace(entry, purchase=entry.purchase * 1000 + len(self._stored))\n"
        "        identity = (entry.ticket, entry.purchase)\n",
    ),
    Mutant(
        "any batch that fits is taken for ours",
        f"{ENGINE}/batch/follow.py",
        '.custom_id.startswith(f"{batch.nonce}-")',
        '.custom_id.startswith("")',
    ),
    Mutant(
        "a rescue is sent before its attempt is written",
        f"{ENGINE}/now/send.py",
        "if not await self._context.store.start_sending(entry, self._context.name, self._context.now()):",
        "if False:",
    ),
    Mutant(
        "nobody is rescued",
        f"{ENGINE}/batch/rescue.py",
        "        if upcoming is None:",
        "        if upcoming is not None:",
    ),
    Mutant(
        "the provider's clock is taken for ours",
        f"{ENGINE}/batch/follow.py",
        "self._api.offsets.get(upstream.provider, batch.clock_offset)",
        "0.0",
    ),
    Mutant(
        "an expired line is taken for an answer",
        f"{ENGINE}/batch/collect.py",
        '"expired": OutcomeKind.EXPIRED',
        '"expired": OutcomeKind.SUCCEEDED',
        test="tests/peers/test_dispatching.py",
    ),
    Mutant(
        "an abandoned create leaves no trace in the ledger",
        f"{ENGINE}/batch/follow.py",
        "        await self._collector.settle_unmentioned(batch, reason, doubted=True)\n",
        "",
    ),
    Mutant(
        "a batch that is denied once is given up",
        "src/carpool/planners/tracking.py",
        "return count + 1 >= DENIALS_TO_BELIEVE and now - since >= DOUBT_S",
        "return True",
        test=LOST,
    ),
    Mutant(
        "a batch is given up although no list can be had",
        f"{ENGINE}/batch/follow.py",
        "if len(batches) == 1 and wanted_ids and batches[0].id not in self._denials:",
        "if len(batches) == 1 and wanted_ids:",
        test=LOST,
    ),
    Mutant(
        "a denied batch leaves no trace in the ledger",
        f"{ENGINE}/batch/collect.py",
        "            await self._context.settle(settlements)\n",
        "",
        test=LOST,
    ),
    Mutant(
        "the calls of a denied batch are not bought again",
        f"{ENGINE}/batch/collect.py",
        "        lane = retry_lane(view, self._context.policy, self._context.now())\n",
        "        lane = None\n",
        test=LOST,
    ),
    Mutant(
        "a denied batch is never looked for again",
        f"{ENGINE}/batch/follow.py",
        "self._not_due_until[batch.id] = now + watch_pace(now - since)",
        "self._not_due_until[batch.id] = now + 1e9",
        test=LOST,
    ),
    Mutant(
        "a rescue says that its batch gave the call back",
        f"{ENGINE}/batch/collect.py",
        "reason=LATE if late else entry.reason",
        "reason=entry.reason",
        test="tests/engine/batch/test_rescue_trail.py",
    ),
    Mutant(
        "a batch that was stopped for its calls is taken for one that somebody else stopped",
        f"{ENGINE}/batch/rescue.py",
        "            await context.store.annotate(batch.id, note=PRESSED)  # before the provider says that it stops\n",
        "",
        test="tests/engine/batch/test_rescue_trail.py",
    ),
    Mutant(
        "one batch's stranger is everybody's",
        f"{SQL}/batches.sql",
        "SELECT provider_id FROM batches WHERE credential = :credential AND provider_id IS NOT NULL\n",
        "SELECT provider_id FROM batches WHERE credential = :credential AND provider_id IS NOT NULL\n"
        "UNION SELECT provider_id FROM suspects WHERE credential = :credential AND verdict = 'stranger'\n",
        test="tests/contract/test_store_batches.py",
    ),
    Mutant(
        "an open call loses its body when its batch is tidied",
        f"{SQL}/batches.sql",
        "AND id > :after AND state = 'settled'\n",
        "AND id > :after\n",
        test="tests/contract/test_store_settling.py",
    ),
    Mutant(
        "who leaves at the door keeps the pending_call",
        f"{ENGINE}/batch/admit.py",
        "if pending_call.left:\n            self._release(pending_call)",
        "if pending_call.left:\n            pass",
        test="tests/engine/batch/test_admit.py",
    ),
    Mutant(
        "one bad call keeps its whole group out",
        f"{ENGINE}/batch/admit.py",
        "if len(group) > 1:",
        "if len(group) > 9999:",
        test="tests/engine/batch/test_admit.py",
    ),
    Mutant(
        "calls on their way to disk take no room",
        f"{ENGINE}/batch/admit.py",
        "return len(self._context.waiters) + len(self._arriving)",
        "return len(self._context.waiters)",
        test="tests/engine/batch/test_admit.py",
    ),
    Mutant(
        "a webhook is heard by the process that it reaches, and by no other",
        f"{ENGINE}/batch/follow.py",
        'self._context.background.spawn(self._pass_on(provider, provider_id), "hint_batch")',
        "pass",
        test="tests/engine/cluster/test_membership.py",
    ),
    Mutant(
        "an answer comes without what it cost",
        "src/carpool/stores/operations/session.py",
        "None if entry[0] is None else entry_value(session, tuple(entry))",
        "None",
        test="tests/contract/test_store_settling.py",
    ),
    Mutant(
        "an attempt on now is not noted before it is made",
        "src/carpool/stores/sqlite/__init__.py",
        "            current.write(line)\n",
        "",
        test="tests/stores/sqlite/test_attempts.py",
    ),
    Mutant(
        "an attempt on now is written down after its answer",
        f"{ENGINE}/now/send.py",
        "                await record_attempt(entry)\n                response = await self.send(request)\n",
        "                response = await self.send(request)\n                await record_attempt(entry)\n",
    ),
    Mutant(
        "a credential does not depend on its key",
        f"{ENGINE}/keyring.py",
        '*(f"{name}:{value}" for name, value in sorted(secret))',
        "*(name for name, _ in sorted(secret))",
        test="tests/frontends/proxy/test_isolation.py",
    ),
    Mutant(
        "two keys at once are taken for one of them",
        "src/carpool/core/keys.py",
        "return keys.pop() if len(keys) == 1 else None",
        "return min(key or '' for key in keys) if keys else None",
        test="tests/frontends/proxy/test_isolation.py",
    ),
    Mutant(
        "a key in another header shares the batch",
        "src/carpool/planners/routing.py",
        "credential=call.payer or call.credential",
        "credential=call.credential",
        test="tests/frontends/proxy/test_isolation.py",
    ),
    Mutant(
        "a key in another header is another credential",
        f"{ENGINE}/keyring.py",
        "return self._owners.get(name, name)",
        "return name",
        test="tests/frontends/proxy/test_isolation.py",
    ),
    Mutant(
        "a ticket is shown to any key",
        "src/carpool/frontends/proxy/tickets.py",
        "find(ticket, list(owners))\n        if row is None:\n"
        "            return await self._engine.tickets.purchases(ticket, list(owners))\n"
        "        if (passed := owners[row.credential]) is not None:",
        "find(ticket, None)\n        if row is None:\n"
        "            return await self._engine.tickets.purchases(ticket, list(owners))\n"
        "        if (passed := owners.get(row.credential)) is not None:",
        test="tests/frontends/proxy/test_returning.py",
    ),
    Mutant(
        "carpool answers to any name",
        "src/carpool/planners/access/providers.py",
        "        if not self._accepts(names[0]):\n",
        "        if not names[0]:\n",
        test="tests/frontends/proxy/test_hosts.py",
    ),
    Mutant(
        "the name in a target is not looked at",
        f"{PROXY}/http/bounds.py",
        '        if self.url[:1] != b"/":\n',
        "        if not self.url:\n",
        test="tests/frontends/proxy/test_hosts.py",
    ),
    Mutant(
        "anybody may say for whom a request is passed on",
        "src/carpool/planners/access/providers.py",
        "return bool(self._trusted) and peer is not None",
        "return not self._trusted or peer is not None",
        test="tests/frontends/proxy/test_hosts.py",
    ),
    Mutant(
        "the beginning of the admin token is enough",
        f"{PROXY}/admin.py",
        "hashlib.sha256(token.encode())",
        "hashlib.sha256(token[:10].encode())",
        test="tests/frontends/proxy/test_admin_token.py",
    ),
    Mutant(
        "a redirect is followed with the key",
        "src/carpool/http/http1/client.py",
        "        return response\n",
        '        moved = dict(response.headers).get("location")\n'
        "        if moved is not None:\n"
        "            return await self.send(HttpRequest(request.method, moved, request.headers, request.body))\n"
        "        return response\n",
        test="tests/frontends/proxy/test_hosts.py",
    ),
    Mutant(
        "a name that leads to the metadata service is asked",
        "src/carpool/http/http1/client.py",
        "if not self._allow_link_local and any(",
        "if self._allow_link_local and any(",
        test="tests/http/http1/test_proxy.py",
    ),
    Mutant(
        "a crash quotes what it stumbled over",
        "src/carpool/core/errors.py",
        "    if isinstance(error, CarpoolError):\n",
        "    if isinstance(error, Exception):\n",
        test="tests/frontends/proxy/test_tracebacks.py",
    ),
    Mutant(
        "others may reach it without a token",
        "src/carpool/cli/listen.py",
        "    if not token and (why := reached(host, serving)):\n",
        "    if not host and (why := reached(host, serving)):\n",
        test="tests/cli/test_serve_network.py",
    ),
    Mutant(
        "a rescue is quoted for nothing",
        "src/carpool/planners/quotes.py",
        "(1 - odds.on_time) * (rescue + odds.billed * batch)",
        "(1 - odds.on_time) * odds.billed * batch",
        test="tests/planners/test_quotes.py",
    ),
    Mutant(
        "what has expired is quoted as read",
        "src/carpool/planners/quotes.py",
        "stored = call.on_sync.tokens if call.on_sync.expires > call.now else 0",
        "stored = call.on_sync.tokens",
        test="tests/planners/test_quotes.py",
    ),
    Mutant(
        "turns to come are quoted for nothing",
        "src/carpool/planners/quotes.py",
        "        return turns * steady  # whoever",
        "        return 0.0  # whoever",
        test="tests/planners/test_quotes.py",
    ),
    Mutant(
        "a batch's latency is left out between two reads",
        "src/carpool/planners/quotes.py",
        "outlook.back_in_batch(life) / returns",
        "outlook.back(life) / returns",
        test="tests/planners/test_quotes.py",
    ),
    Mutant(
        "a probe costs nothing",
        "src/carpool/planners/quoter.py",
        "saved - max(0.0, batch.total - best.total)",
        "saved",
        test="tests/planners/test_quoter.py",
    ),
    Mutant(
        "the silent are taken to return",
        "src/carpool/planners/agents.py",
        "                kind.silent(known.counted_until, horizon, now)\n",
        "",
        test="tests/planners/test_agents.py",
    ),
    Mutant(
        "requests are edited although their client only lets carpool observe",
        "src/carpool/planners/caching/plan.py",
        "    if call.caching is not CachingMode.PLAN or prompt is None or prompt.implicit:\n",
        "    if prompt is None or prompt.implicit:\n",
        test="tests/planners/caching/test_plan.py",
    ),
    Mutant(
        "a prefix that was not read is expected again",
        "src/carpool/planners/caching/index.py",
        "            if entry.position > hit and entry.renewed <= started:",
        "            if entry.position > hit and entry.renewed < 0:",
        test="tests/planners/caching/test_index.py",
    ),
    Mutant(
        "one credential's prefixes are expected by another",
        "src/carpool/engine/prompt_caches.py",
        'else (provider, credential, "")\n',
        'else (provider, "", "")\n',
        test="tests/engine/test_prompt_caches.py",
    ),
    Mutant(
        "a model that refused edits gets them again",
        "src/carpool/engine/prompt_caches.py",
        "        self._refused[call.provider, call.model] = None\n",
        "",
        test="tests/engine/test_prompt_caches.py",
    ),
    Mutant(
        "a client's own life of a mark is cut",
        "src/carpool/dialects/anthropic/caching.py",
        "            if mark.ttl == SHORT and LONG in",
        "            if SHORT in",
        test="tests/dialects/anthropic/test_caching.py",
    ),
    Mutant(
        "a fifth mark is added",
        "src/carpool/dialects/anthropic/caching.py",
        "MAX_MARKS: Final = 4\n",
        "MAX_MARKS: Final = 40\n",
        test="tests/dialects/anthropic/test_caching.py",
    ),
    Mutant(
        "a message that was started early is started again",
        "src/carpool/dialects/keep_alive.py",
        '            if each.startswith(b"event: message_start\\n"):\n',
        '            yield each\n            if each.startswith(b"event: message_start\\n"):\n',
        test="tests/dialects/test_keep_alive.py",
    ),
    Mutant(
        "a client's budget beats the cap of a rule",
        "src/carpool/planners/access/options.py",
        "    if until is not None and until <= now + most:\n",
        "    if until is not None:\n",
        test="tests/planners/access/test_rules.py",
    ),
    Mutant(
        "the dead are still awaited",
        "src/carpool/stores/operations/batches.py",
        "    if dead := session.departed(now):\n",
        "    if (dead := session.departed(now)) and now < 0:\n",
    ),
    Mutant(
        "a rescue starts at the deadline",
        "src/carpool/planners/routing.py",
        "return call.deadline - sync_seconds(call, forecast) - RESCUE_MARGIN",
        "return call.deadline",
    ),
    Mutant(
        "two engines send the same call",
        f"{SQL}/calls.sql",
        "sender IS NULL OR sender = :engine OR sender NOT IN {live}",
        "sender IS NULL OR sender IS NOT NULL OR :engine = '' OR :now = 0",
        test="tests/contract/test_store_batches.py",
    ),
    Mutant(
        "the key is left out", "src/carpool/core/upstream.py", "headers=ask.headers + secret", "headers=ask.headers"
    ),
    Mutant(
        "every batch has the same nonce",
        f"{ENGINE}/batch/buy.py",
        "            nonce=context.new_nonce(),",
        '            nonce="0123456789",',
    ),
    Mutant(
        "a create is longer than announced",
        f"{ENGINE}/batch/buy.py",
        "(batch.count - 1) * len(between)",
        "batch.count * len(between)",
    ),
    Mutant(
        "a batch is finished before its results are read",
        f"{ENGINE}/batch/collect.py",
        "            tally = await self._stream(batch, upstream, places)\n",
        "            await context.store.move(batch.id, BatchState.COLLECTED)\n"
        "            tally = await self._stream(batch, upstream, places)\n",
    ),
    Mutant(
        "a call that boarded while it waited for its turn is no rescue",
        f"{ENGINE}/now/send.py",
        "        return replace(request, kind=EntryKind.RESCUE) if in_batch else request\n",
        "        return request\n",
        test="tests/engine/now/test_send.py",
    ),
    Mutant(
        "a caller who comes back buys again",
        "src/carpool/stores/operations/admission.py",
        "    if ticket is not None:\n        return _reassign",
        "    if ticket is not None and call.key is not None:\n        return _reassign",
    ),
    Mutant(
        "a body is bounded only as it was sent",
        f"{ENGINE}/now/decompress.py",
        "        if len(body) > most:",
        "        if len(body) > 1e12:",
        test=LIMITS.format("test_the_bound_of_a_body_holds_for_what_it_unpacks_to"),
    ),
    Mutant(
        "an answer that is a bomb is unpacked to its end",
        f"{ENGINE}/now/decompress.py",
        "broken = given > max(_FREE, _RATIO * taken)",
        "broken = False",
        test="tests/engine/now/test_decompress.py",
    ),
    Mutant(
        "another coding than chunked is taken for chunked",
        f"{PROXY}/http/bounds.py",
        'return codings == [b"chunked"] and version == "1.1"',
        'return codings[-1].endswith(b"chunked")',
        test=LIMITS.format("test_what_can_be_read_in_two_ways_is_read_in_none"),
    ),
    Mutant(
        "trailers have no bound",
        f"{PROXY}/http/bounds.py",
        "        self.left -= len(pair[0]) + len(pair[1]) + 4\n",
        "",
        test=LIMITS.format("test_too_much_is_refused_in_a_sentence"),
    ),
    Mutant(
        "a refusal overtakes the answer before it",
        f"{PROXY}/http/bounds.py",
        "            self._last_words = response\n",
        "            self._send_refusal(response)\n",
        test=LIMITS.format("test_what_was_asked_before_is_answered_first"),
    ),
    Mutant(
        "depth is unchecked",
        "src/carpool/dialects/json_object.py",
        "    except RecursionError:\n        raise BadCall",
        "    except ZeroDivisionError:\n        raise BadCall",
        test=LIMITS.format("test_a_body_of_any_depth_is_understood_or_passed_on"),
    ),
    Mutant(
        "who is slow may stay",
        f"{PROXY}/http/bounds.py",
        "            if self._stalls >= sender:",
        "            if self._stalls < 0:",
        test=LIMITS.format("test_who_sends_nothing_more_is_told_and_cut"),
    ),
    Mutant(
        "one key takes all the room",
        f"{ENGINE}/batch/admit.py",
        "if context.waiters.of(call.credential) >= limit:",
        "if limit <= 0:",
        test=LIMITS.format("test_nobody_takes_all_the_room_there_is"),
    ),
    Mutant(
        "a gate leaks the slot of a client that left",
        f"{ENGINE}/now/gate.py",
        "        gate.throttle.left()\n        if isinstance(error, NotConnected):\n",
        "        if isinstance(error, NotConnected | ConnectionBroken):\n            gate.throttle.left()\n"
        "        if isinstance(error, NotConnected):\n",
        test=f"{PRESSED}::test_a_client_that_leaves_during_its_call_gives_its_slot_back",
    ),
    Mutant(
        "a gate leaks the slot of a call that failed",
        f"{ENGINE}/now/gate.py",
        "        gate.throttle.left()\n        if isinstance(error, NotConnected):\n",
        "        if not isinstance(error, NotConnected | ConnectionBroken):\n            gate.throttle.left()\n"
        "        if isinstance(error, NotConnected):\n",
        test=f"{PRESSED}::test_every_way_to_fail_gives_its_slot_back",
    ),
    Mutant(
        "a breaker that opened never lets a probe through",
        "src/carpool/planners/pressure/breaker.py",
        "        return max(now, self.open_until, self._probed_at + PROBE_S)\n",
        "        return math.inf\n",
        test="tests/planners/pressure/test_breaker.py",
    ),
    Mutant(
        "a breaker lets everybody probe",
        "src/carpool/planners/pressure/breaker.py",
        "        return max(now, self.open_until, self._probed_at + PROBE_S)\n",
        "        return max(now, self.open_until)\n",
        test=f"{PRESSED}::test_one_call_at_a_time_asks_whether_the_provider_is_well",
    ),
    Mutant(
        "a 429 is ignored",
        f"{ENGINE}/now/gate.py",
        "REFUSALS = frozenset({429, 529})",
        "REFUSALS: frozenset[int] = frozenset()",
        test=f"{PRESSED}::test_calls_wait_for_the_time_that_was_named_and_then_go",
    ),
    Mutant(
        "a tag set keeps its turn",
        "src/carpool/planners/pressure/fair_queue.py",
        "            self._queues[place.tags] = self._queues.pop(place.tags)  # behind the others again\n",
        "            pass\n",
        test="tests/planners/pressure/test_fair_queue.py",
    ),
    Mutant(
        "everybody comes back in the moment that the gate opens",
        "src/carpool/planners/pressure/throttle.py",
        "        if self.pressed or waited:\n",
        "        if self.pressed and waited and now < 0:\n",
        test="tests/planners/pressure/test_throttle.py",
    ),
    Mutant(
        "retries have no budget",
        f"{ENGINE}/now/send.py",
        "delay = max(delay, asked or 0.0, slot.retry_wait())",
        "delay = max(delay, asked or 0.0)",
        test=f"{PRESSED}::test_when_much_fails_not_all_of_it_is_tried_again_at_once",
    ),
    Mutant(
        "what was never sent is entered as a purchase",
        f"{ENGINE}/now/send.py",
        "        if not entry.sent:\n",
        "        if entry.purchase > UNSENT:\n",
        test=f"{PRESSED}::test_what_was_never_sent_stands_in_no_ledger",
    ),
    Mutant(
        "an answer that shows no room holds nobody back",
        "src/carpool/planners/pressure/throttle.py",
        "        return self.limit == 0.0 or self.level(now)",
        "        return self.limit >= 0.0 or self.level(now)",
        test="tests/planners/pressure/test_throttle.py",
    ),
    Mutant(
        "a model is not part of the pool", "src/carpool/planners/routing.py", '"" if mixes_models else call.model', '""'
    ),
    Mutant(
        "an endpoint is not part of the pool",
        "src/carpool/planners/routing.py",
        "        endpoint=call.endpoint,",
        "        endpoint=_FIRST.setdefault(call.provider, call.endpoint),",
        test="tests/planners/test_routing.py",
    ),
    Mutant(
        "the second of two result files is not read",
        f"{ENGINE}/batch/collect.py",
        "in places:\n",
        "in places[:1]:\n",
        test=WORLDS.format("test_what_failed_stands_in_the_other_file"),
    ),
    Mutant(
        "a create that was cut is sent again with its file",
        f"{ENGINE}/batch/buy.py",
        "            else:\n                await self._record_unknown(batch, str(error))\n            return True\n",
        "            elif again:\n                return False\n            else:\n"
        "                await self._record_unknown(batch, str(error))\n            return True\n",
        test=WORLDS.format("test_a_create_that_was_cut_is_looked_for_and_never_sent_again"),
    ),
    Mutant(
        "a batch that found no room is taken for one that was bought",
        f"{ENGINE}/batch/follow.py",
        "        if report.failure is not None:\n",
        "        if report.failure is not None and not report.failure.queue_full:\n",
        test=WORLDS.format("test_what_finds_no_room_waits_for_it_and_costs_nothing"),
    ),
    Mutant(
        "the finished part of an expired batch is bought again",
        f"{ENGINE}/batch/collect.py",
        "            tally[line.result] += 1\n",
        '            if line.result == "succeeded" and self._context.now() > (batch.expires_at or 1e99):\n'
        "                continue\n"
        "            tally[line.result] += 1\n",
        test=WORLDS.format("test_a_part_of_an_expired_batch_is_kept_and_the_rest_bought_anew"),
    ),
    Mutant(
        "whoever has a nonce is ours",
        "src/carpool/planners/tracking.py",
        "if report.nonce == batch.nonce",
        "if report.nonce",
        test=WORLDS.format("test_what_is_not_ours_is_never_taken_for_it"),
    ),
    Mutant(
        "a stranger without a nonce is ours",
        "src/carpool/planners/tracking.py",
        "if report.nonce == batch.nonce",
        'if report.nonce in (batch.nonce, "")',
        test=WORLDS.format("test_what_is_not_ours_is_never_taken_for_it"),
    ),
    Mutant(
        "a webhook is believed whoever signed it",
        "src/carpool/dialects/openai/webhooks.py",
        "        if not any(hmac.compare_digest(signed, signature)",
        "        if not signed and not any(hmac.compare_digest(signed, signature)",
        test="tests/frontends/proxy/test_webhooks.py",
    ),
    Mutant(
        "a webhook is never too old",
        "src/carpool/dialects/openai/webhooks.py",
        "abs(int(stamp) - now) > TOLERANCE_S",
        "abs(int(stamp) - now) < 0",
        test="tests/frontends/proxy/test_webhooks.py",
    ),
    Mutant(
        "a client that hangs up after the last event was not answered",
        "src/carpool/dialects/openai/usage.py",
        "over = whole or self._over",
        "over = whole",
        test="tests/frontends/proxy/test_disconnect.py",
    ),
    Mutant(
        "an answer that broke off has a price",
        f"{ENGINE}/now/send.py",
        "elif end.final:",
        "elif end.usage:",
        test="tests/frontends/proxy/test_disconnect.py",
    ),
    Mutant(
        "an attempt that comes again takes what was said of it",
        f"{SQL}/ledger.sql",
        "usage = coalesce(excluded.usage, usage)",
        "usage = excluded.usage",
        test="tests/contract/test_store_settling.py",
    ),
    Mutant(
        "purchases are shown to whoever knows their ticket",
        "src/carpool/stores/operations/ledger.py",
        'query = {"ticket": ticket, "credentials": session.credential_filter(credentials)}',
        'query = {"ticket": ticket, "credentials": session.credential_filter(None)}',
        test="tests/frontends/proxy/test_isolation.py",
    ),
    Mutant(
        "a webhook wakes nobody",
        f"{ENGINE}/batch/follow.py",
        "self._reported_ended.add(account)",
        "pass",
        test="tests/frontends/proxy/test_webhooks.py",
    ),
    Mutant(
        "what flex refuses stands in the ledger as unknown",
        f"{ENGINE}/now/flex.py",
        '        await self._context.store.record(ledger.free(entry, "flex had no room"))\n',
        "",
        test=WORLDS.format("test_flex_that_has_no_room_is_free_and_another_lane_is_on_time"),
    ),
    Mutant(
        "flex that took too long is asked for as if for the first time",
        f"{ENGINE}/now/flex.py",
        "Refused(EntryKind.RESCUE)",
        "Refused(EntryKind.PURCHASE)",
        test=WORLDS.format("test_flex_that_takes_too_long_is_a_rescue"),
    ),
    Mutant(
        "results that are promised are waited for for ever",
        f"{ENGINE}/batch/follow.py",
        "provider_now - report.ended_at >= NEVER_NAMED_S",
        "provider_now < 0",
        test=WORLDS.format("test_results_that_are_promised_and_never_named_are_not_waited_for"),
    ),
    Mutant(
        "a refusal leaves the pace as it was",
        "src/carpool/planners/pressure/quota.py",
        "self._paced(max(1, self.rpm // 2))",
        "self",
        test="tests/planners/pressure/test_quota.py",
    ),
    Mutant(
        "a poll costs the same however few requests are left",
        "src/carpool/planners/poll_pace.py",
        "((requests.burst - RESERVE) / left) ** STEEPNESS",
        "1.0",
        test="tests/planners/test_poll_pace.py",
    ),
    Mutant(
        "polls take the last request",
        "src/carpool/planners/poll_pace.py",
        "left = requests.available(at) - RESERVE",
        "left = requests.available(at)",
        test="tests/planners/test_poll_pace.py",
    ),
    Mutant(
        "the forecast is believed",
        "src/carpool/planners/poll_pace.py",
        "            chance = max(ends_within(seconds, age), _surprise(seconds, age))\n",
        "            chance = ends_within(seconds, age)\n",
        test="tests/planners/test_poll_pace.py",
    ),
    Mutant(
        "the forecast of ends is ignored",
        "src/carpool/planners/poll_pace.py",
        "            chance = max(ends_within(seconds, age), _surprise(seconds, age))\n",
        "            chance = _surprise(seconds, age)\n",
        test="tests/planners/test_poll_pace.py",
    ),
    Mutant(
        "an old batch is polled like a young one",
        "src/carpool/planners/poll_pace.py",
        " * PATIENCE / (PATIENCE + age)",
        "",
        test="tests/planners/test_poll_pace.py",
    ),
    Mutant(
        "a thousand batches are worth no more than one",
        "src/carpool/planners/poll_pace.py",
        "late += count * chance",
        "late += chance",
        test="tests/planners/test_poll_pace.py",
    ),
    Mutant(
        "a tenant with many pools gets many turns",
        "src/carpool/planners/pooling.py",
        "return not pressing, turns.place(tenant), _urgency(lines[tenant][0])",
        "return not pressing, 0.0, _urgency(lines[tenant][0])",
        test="tests/planners/test_pooling.py",
    ),
    Mutant(
        "who is always in a hurry is always first",
        "src/carpool/planners/pressure/turns.py",
        "return self.place(tenant) < min(map(self.place, waiting)) + AHEAD",
        "return True",
        test="tests/planners/test_pooling.py",
    ),
    Mutant(
        "a hurry gives no turn",
        "src/carpool/planners/pooling.py",
        "return not pressing, turns.place(tenant)",
        "return False, turns.place(tenant)",
        test="tests/planners/test_pooling.py",
    ),
    Mutant(
        "time off earns turns",
        "src/carpool/planners/pressure/turns.py",
        "        return Turns(first, MappingProxyType(places))",
        "        return Turns(0.0, MappingProxyType(places))",
        test="tests/planners/pressure/test_turns.py",
    ),
    Mutant(
        "rescues wait for the last moment however many they are",
        "src/carpool/engine/batch/rescue.py",
        "return {limited: seconds for limited, seconds in early.items() if seconds > 0}",
        "return {}",
        test="tests/engine/batch/test_rescue_room.py",
    ),
    Mutant(
        "calls are batched whose rescue has no room",
        "src/carpool/engine/engine.py",
        "has_room(call, decision.rescue_at)",
        "has_room(call, 1e12)",
        test="tests/engine/batch/test_rescue_room.py",
    ),
    Mutant(
        "calls of one moment do not see each other's rescues",
        "src/carpool/planners/rescue_room.py",
        "snapshot.calls += 1",
        "snapshot.calls += 0",
        test="tests/planners/test_rescue_room.py",
    ),
    Mutant(
        "what a pressed batch gives back is batched again",
        "src/carpool/planners/tracking.py",
        "> now and not pressed)",
        "> now)",
        test="tests/planners/test_tracking.py",
    ),
    Mutant(
        "direct calls leave rescues the whole limit",
        "src/carpool/planners/pressure/throttle.py",
        "max(requests - used, requests / 2)",
        "requests",
        test="tests/planners/pressure/test_throttle.py",
    ),
    Mutant(
        "a create that was never sent is in doubt",
        f"{ENGINE}/batch/buy.py",
        "            unsent=True,\n",
        "",
        test="tests/engine/batch/test_openai_crashes.py",
    ),
    Mutant(
        "a create goes out before that is written down",
        f"{SQL}/batches.sql",
        "UPDATE batches SET unsent = 0, sent_at = :now\n",
        "UPDATE batches SET sent_at = :now\n",
        test="tests/engine/batch/test_openai_crashes.py",
    ),
    Mutant(
        "a kept call on now has one try",
        f"{ENGINE}/now/send.py",
        "self._context.now() + KEPT_MAX_WAIT_S if waits_long else call.deadline",
        "call.deadline",
        test="tests/sim/test_seeds.py",
    ),
    Mutant(
        "a full queue is asked again at once",
        f"{ENGINE}/batch/api.py",
        "            self._queues.full(account, batch, refusal.queue_tokens, context.now())\n",
        "",
        test=WORLDS.format("test_what_finds_no_room_waits_for_it_and_costs_nothing"),
    ),
)


def caught(mutant: Mutant) -> tuple[bool, str]:
    """Whether it was noticed, and by whom; or why not."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        for part in ("src", "tests", "pyproject.toml"):
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
        _break(copy / mutant.file, mutant)
        if mutant.test is None:
            done = _run(copy, [sys.executable, "-m", "carpool.sim", str(SEEDS), "--jobs", "1", "--first-broken"])
            found = re.search(r"Seed (\d+): (.*)", done.stdout)
            if found:
                return True, f"seed {found[1]}: {found[2][:90]}"
            # A world that breaks off proves nothing: the bug may be one that nobody could make.
            return False, (done.stderr.strip().splitlines() or ["all worlds were clean"])[-1]
        done = _run(copy, [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.test])
        return done.returncode == 1, mutant.test


def _break(path: Path, mutant: Mutant) -> None:
    text = path.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has its line {text.count(mutant.old)} times. Mend the list.")
    text = text.replace(mutant.old, mutant.new)
    if "_FIRST" in mutant.new:
        text += "\n_FIRST: dict[str, str] = {}\n"
    path.write_text(text, "utf-8")


def _run(copy: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 2, "", "it took too long")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="those whose name contains this")
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if asked.only in mutant.name]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        survivors = 0
        for mutant, (noticed, why) in zip(chosen, pool.map(caught, chosen), strict=True):
            survivors += not noticed
            print(f"{'caught  ' if noticed else 'SURVIVED'}  {mutant.name}  ({why})", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were caught.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
