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

ROOT = Path(__file__).parents[2]
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
PRESSED = "tests/proxy/test_pressure.py"
PROXY = "src/carpool/doors/proxy"
LIMITS = "tests/proxy/test_limits.py::{}"
WORLDS = "tests/sim/test_openai_worlds.py::{}"
MUTANTS = (
    Mutant(
        "a 5xx on create is taken for a refusal",
        f"{ENGINE}/buying.py",
        "(status < 500 and status != 408)",
        "status != 408",
    ),
    Mutant(
        "a cut create is taken for one never sent",
        f"{ENGINE}/buying.py",
        "        except NotConnected as error:",
        "        except WireError as error:",
    ),
    Mutant(
        "the lease is not checked before the bytes go out",
        f"{ENGINE}/buying.py",
        "return await desk.store.still_mine(",
        "return True or await desk.store.still_mine(",
        test="tests/engine/test_buying.py",
    ),
    Mutant(
        "whoever does not lead makes batches too",
        "src/carpool/stores/_batches.py",
        'if intent.account is not None and session.row("leads", leading) is None:',
        "if False:",
        test="tests/contract/test_store_leading.py",
    ),
    Mutant(
        "every engine rescues what others await",
        f"{ENGINE}/rescuing.py",
        "return one.awaiter is None or one.awaiter == self._desk.name",
        "return True",
        test="tests/engine/test_sharing.py",
    ),
    Mutant(
        "who was taken for dead forgets its clients",
        f"{ENGINE}/sharing.py",
        "        await self._await_again()\n",
        "",
        test="tests/engine/test_sharing.py",
    ),
    Mutant(
        "who was taken for dead goes on with another's batch",
        f"{ENGINE}/desk.py",
        "self.store.move(batch.id, target, owner=self.name, **changes)",
        "self.store.move(batch.id, target, **changes)",
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
        "src/carpool/stores/_settling.py",
        "call is not None and call.state != TicketState.SETTLED",
        "call is not None",
    ),
    Mutant(
        "betas are not part of the pool", "src/carpool/routing.py", "headers=call.headers", "headers=call.headers[-1:]"
    ),
    Mutant(
        "a credential is not part of the pool",
        "src/carpool/routing.py",
        "credential=call.credential",
        'credential=_FIRST.setdefault("", call.credential)',
    ),
    Mutant("a missing line is lost", f"{ENGINE}/collecting.py", "await self._forgotten(batch)\n", "0\n"),
    Mutant(
        "what a piece brings beyond a chunk is lost",
        f"{ENGINE}/collecting.py",
        "chunk, size = chunk[CHUNK:], 0",
        "chunk, size = [], 0",
        test="tests/engine/test_collecting.py",
    ),
    Mutant(
        "who looks often holds up who brings answers home",
        f"{ENGINE}/desk.py",
        "        async with self.lines[self.keyring.account(credential)]:\n",
        "        if True:\n",
        test="tests/engine/test_engine_parts.py",
    ),
    Mutant(
        "a refused rescue is the last word while a batch still carries the call",
        f"{ENGINE}/sending.py",
        "if not answer.ok and await self._left_to_its_batch(errand, entry, answer):",
        "if False:",
        test="tests/engine/test_rescuing.py",
    ),
    Mutant(
        "nobody looks for the answer of a call whose rescue was refused",
        f"{ENGINE}/rescuing.py",
        "if sent is Sent.LEFT and batch is not None",
        "if sent is Sent.TAKEN and batch is not None",
        test="tests/engine/test_rescuing.py",
    ),
    Mutant(
        "a batch that is all that can answer is looked at once only",
        f"{ENGINE}/rescuing.py",
        "self._relied_on[batch] = now + RELIED_ON_S, until",
        "self._relied_on[batch] = until, until",
        test="tests/engine/test_rescuing.py",
    ),
    Mutant(
        "a store in trouble forgets a call whose rescue was refused",
        f"{ENGINE}/sending.py",
        '            await self._desk.insist("writing off a purchase", lambda: self._desk.store.record(free))\n',
        "            await self._desk.store.record(free)\n",
        test="tests/engine/test_rescuing.py",
    ),
    Mutant(
        "a call on disk waits for its turn beyond its deadline",
        f"{ENGINE}/gating.py",
        "if kept and not tried:",
        "if kept:",
        test="tests/engine/test_rescuing.py",
    ),
    Mutant(
        "results that failed often are never in a hurry",
        f"{ENGINE}/collecting.py",
        "min(self._retry_at[batch.id], self._desk.now() + RETRY_S)",
        "self._retry_at[batch.id]",
        test="tests/engine/test_rescuing.py",
    ),
    Mutant(
        "a mistake is taken for the provider's trouble",
        "src/carpool/dialects/anthropic/errors.py",
        '"invalid_request_error": 400,',
        '"invalid_request_error": 500,',
    ),
    Mutant(
        "a suspect is cancelled",
        f"{ENGINE}/reconciling.py",
        '            await desk.store.suspect(batch.id, provider_id, "watched")\n',
        '            await desk.store.suspect(batch.id, provider_id, "watched")\n'
        "            await upstream.ask(upstream.dialect.cancel(batch.key.headers, provider_id), "
        "desk.keyring.secret(batch.key.credential), timeout=60)\n",
    ),
    Mutant(
        "a second answer has no line in the ledger",
        "src/carpool/stores/_settling.py",
        "        if entry is not None:\n            late",
        "        if entry is not None and won:\n            late",
    ),
    Mutant(
        "a line is billed anew whenever it is read",
        "src/carpool/stores/_ledger.py",
        "        identity = (entry.ticket, entry.purchase)\n",
        "        entry = replace(entry, purchase=entry.purchase * 1000 + len(self._stood))\n"
        "        identity = (entry.ticket, entry.purchase)\n",
    ),
    Mutant(
        "any batch that fits is taken for ours",
        f"{ENGINE}/reconciling.py",
        '.custom_id.startswith(f"{batch.nonce}-")',
        '.custom_id.startswith("")',
    ),
    Mutant(
        "a rescue is sent before its attempt is written",
        f"{ENGINE}/sending.py",
        "if not await self._desk.store.start_sending(entry, self._desk.name, self._desk.now()):",
        "if False:",
    ),
    Mutant(
        "nobody is rescued", f"{ENGINE}/rescuing.py", "        if upcoming is None:", "        if upcoming is not None:"
    ),
    Mutant(
        "the provider's clock is taken for ours",
        f"{ENGINE}/reconciling.py",
        "desk.offsets.get(upstream.provider, batch.clock_offset)",
        "0.0",
    ),
    Mutant(
        "an expired line is taken for an answer",
        f"{ENGINE}/collecting.py",
        '"expired": OutcomeKind.EXPIRED',
        '"expired": OutcomeKind.SUCCEEDED',
        test="tests/peers/test_dispatching.py",
    ),
    Mutant(
        "an abandoned create leaves no trace in the ledger",
        f"{ENGINE}/reconciling.py",
        "        await self._collector.doubt(batch, reason)\n",
        "",
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
        "who leaves at the door keeps the seat",
        f"{ENGINE}/entering.py",
        "if seat.left:\n            self._leave(seat)",
        "if seat.left:\n            pass",
        test="tests/engine/test_entering.py",
    ),
    Mutant(
        "one bad call keeps its whole group out",
        f"{ENGINE}/entering.py",
        "if len(group) > 1:",
        "if len(group) > 9999:",
        test="tests/engine/test_entering.py",
    ),
    Mutant(
        "calls on their way to disk take no room",
        f"{ENGINE}/entering.py",
        "return len(self._desk.waiters) + len(self._standing)",
        "return len(self._desk.waiters)",
        test="tests/engine/test_entering.py",
    ),
    Mutant(
        "a webhook is heard by the process that it reaches, and by no other",
        f"{ENGINE}/following.py",
        'self._desk.crew.spawn(self._pass_on(provider, provider_id), "nudge")',
        "pass",
        test="tests/engine/test_sharing.py",
    ),
    Mutant(
        "an answer comes without what it cost",
        "src/carpool/stores/_codec.py",
        "None if entry[0] is None else entry_value(sealing, tuple(entry))",
        "None",
        test="tests/contract/test_store_settling.py",
    ),
    Mutant(
        "an attempt on now is not noted before it is made",
        "src/carpool/stores/_attempts.py",
        "            current.write(line)\n",
        "",
        test="tests/stores/test_sqlite_attempts.py",
    ),
    Mutant(
        "an attempt on now is written down after its answer",
        f"{ENGINE}/sending.py",
        "                await write(entry)\n                response = await self.send(errand)\n",
        "                response = await self.send(errand)\n                await write(entry)\n",
    ),
    Mutant(
        "a ticket is shown to any key",
        "src/carpool/doors/proxy/returning.py",
        "find(ticket, list(owners))\n        if row is not None and (passed := owners[row.credential]) is not None:",
        "find(ticket, None)\n        if row is not None and (passed := owners.get(row.credential)) is not None:",
        test="tests/proxy/test_returning.py",
    ),
    Mutant(
        "carpool answers to any name",
        f"{PROXY}/hosts.py",
        "        if not self._welcomes(names[0]):\n",
        "        if not names[0]:\n",
        test="tests/proxy/test_hosts.py",
    ),
    Mutant(
        "the name in a target is not looked at",
        f"{PROXY}/gate.py",
        '        if self.url[:1] != b"/":\n',
        "        if not self.url:\n",
        test="tests/proxy/test_hosts.py",
    ),
    Mutant(
        "anybody may say for whom a request is passed on",
        f"{PROXY}/hosts.py",
        "        if not self._trusted:\n            return False\n",
        "        if not self._trusted:\n            return True\n",
        test="tests/proxy/test_hosts.py",
    ),
    Mutant(
        "the beginning of the admin token is enough",
        f"{PROXY}/admin.py",
        "hashlib.sha256(token.encode())",
        "hashlib.sha256(token[:10].encode())",
        test="tests/proxy/test_admin_token.py",
    ),
    Mutant(
        "a redirect is followed with the key",
        "src/carpool/wires/straight.py",
        "        return StraightResponse(exchange)\n",
        '        moved = dict(exchange.headers).get("location")\n'
        "        if moved is not None:\n"
        "            return await self.send(WireRequest(request.method, moved, request.headers, request.body))\n"
        "        return StraightResponse(exchange)\n",
        test="tests/proxy/test_hosts.py",
    ),
    Mutant(
        "a name that leads to the metadata service is asked",
        "src/carpool/wires/straight.py",
        "if not self._allow_link_local and any(",
        "if self._allow_link_local and any(",
        test="tests/wires/test_tunnels.py",
    ),
    Mutant(
        "a crash quotes what it stumbled over",
        "src/carpool/crashes.py",
        "    if isinstance(error, CarpoolError):\n",
        "    if isinstance(error, Exception):\n",
        test="tests/proxy/test_crashes.py",
    ),
    Mutant(
        "others may reach it without a token",
        "src/carpool/cli/listening.py",
        "    if not token and (why := reached(host, serving)):\n",
        "    if not host and (why := reached(host, serving)):\n",
        test="tests/proxy/test_serve_network.py",
    ),
    Mutant(
        "a warm conversation leaves for a batch",
        "src/carpool/warmth.py",
        "if chosen or turn.opening or not warmth.warm(",
        "if chosen or turn.opening or warmth.warm(",
        test="tests/test_warmth.py",
    ),
    Mutant(
        "a message that was started early is started again",
        "src/carpool/dialects/early.py",
        '            if event.startswith(b"event: message_start\\n"):\n',
        '            yield event\n            if event.startswith(b"event: message_start\\n"):\n',
        test="tests/dialects/test_early.py",
    ),
    Mutant(
        "a client's budget beats the cap of a rule",
        "src/carpool/rules/deciding.py",
        "    if until is not None and until <= now + most:\n",
        "    if until is not None:\n",
        test="tests/test_rules.py",
    ),
    Mutant(
        "the dead are still awaited",
        "src/carpool/stores/_batches.py",
        "    if dead := session.departed(now):\n",
        "    if (dead := session.departed(now)) and now < 0:\n",
    ),
    Mutant(
        "a rescue starts at the deadline",
        "src/carpool/routing.py",
        "return call.deadline - forecast.sync_seconds(call.max_output_tokens) - RESCUE_MARGIN",
        "return call.deadline",
    ),
    Mutant(
        "two engines send the same call",
        f"{SQL}/calls.sql",
        "sender IS NULL OR sender = :engine OR sender NOT IN {live}",
        "sender IS NULL OR sender IS NOT NULL OR :engine = '' OR :now = 0",
        test="tests/contract/test_store_batches.py",
    ),
    Mutant("the key is left out", f"{ENGINE}/upstream.py", "headers=ask.headers + secret", "headers=ask.headers"),
    Mutant(
        "every batch has the same nonce",
        f"{ENGINE}/buying.py",
        "            nonce=desk.new_nonce(),",
        '            nonce="0123456789",',
    ),
    Mutant(
        "a create is longer than announced",
        f"{ENGINE}/buying.py",
        "(batch.count - 1) * len(between)",
        "batch.count * len(between)",
    ),
    Mutant(
        "a batch is finished before its results are read",
        f"{ENGINE}/collecting.py",
        "            tally = await self._stream(batch, upstream, places)\n",
        "            await desk.store.move(batch.id, BatchState.COLLECTED)\n"
        "            tally = await self._stream(batch, upstream, places)\n",
    ),
    Mutant(
        "a call that boarded while it waited for its turn is no rescue",
        f"{ENGINE}/sending.py",
        "        return replace(errand, kind=EntryKind.RESCUE) if aboard else errand\n",
        "        return errand\n",
        test="tests/engine/test_sending.py",
    ),
    Mutant(
        "a caller who comes back buys again",
        "src/carpool/stores/_admission.py",
        "    if ticket is not None:\n        return _hand_over",
        "    if ticket is not None and call.key is not None:\n        return _hand_over",
    ),
    Mutant(
        "a body is bounded only as it was sent",
        f"{ENGINE}/unpacking.py",
        "        if len(body) > most:",
        "        if len(body) > 1e12:",
        test=LIMITS.format("test_the_bound_of_a_body_holds_for_what_it_unpacks_to"),
    ),
    Mutant(
        "an answer that is a bomb is unpacked to its end",
        f"{ENGINE}/unpacking.py",
        "broken = given > max(_FREE, _RATIO * taken)",
        "broken = False",
        test="tests/engine/test_unpacking.py",
    ),
    Mutant(
        "another coding than chunked is taken for chunked",
        f"{PROXY}/gate.py",
        'return codings == [b"chunked"] and version == "1.1"',
        'return codings[-1].endswith(b"chunked")',
        test=LIMITS.format("test_what_can_be_read_in_two_ways_is_read_in_none"),
    ),
    Mutant(
        "trailers have no bound",
        f"{PROXY}/gate.py",
        "        self.left -= len(pair[0]) + len(pair[1]) + 4\n",
        "",
        test=LIMITS.format("test_too_much_is_refused_in_a_sentence"),
    ),
    Mutant(
        "a refusal overtakes the answer before it",
        f"{PROXY}/gate.py",
        "        elif not cycle.more_body:\n            self._last_words = words\n",
        "        elif not cycle.more_body:\n            self._say(words)\n",
        test=LIMITS.format("test_what_was_asked_before_is_answered_first"),
    ),
    Mutant(
        "depth is unchecked",
        "src/carpool/dialects/faithful.py",
        "    except RecursionError:\n        raise BadCall",
        "    except ZeroDivisionError:\n        raise BadCall",
        test=LIMITS.format("test_a_body_of_any_depth_is_understood_or_passed_on"),
    ),
    Mutant(
        "who is slow may stay",
        f"{PROXY}/gate.py",
        "            if self._stalls >= sender:",
        "            if self._stalls < 0:",
        test=LIMITS.format("test_who_sends_nothing_more_is_told_and_cut"),
    ),
    Mutant(
        "one key takes all the room",
        f"{ENGINE}/entering.py",
        "if self._desk.waiters.of(call.credential) + len(coming) >= most:",
        "if len(coming) >= most:",
        test=LIMITS.format("test_nobody_takes_all_the_room_there_is"),
    ),
    Mutant(
        "a gate leaks the slot of a client that left",
        f"{ENGINE}/gating.py",
        "            self._gates.left(self._gate, self._probe)\n",
        "            return\n",
        test=f"{PRESSED}::test_a_client_that_leaves_during_its_call_gives_its_slot_back",
    ),
    Mutant(
        "a gate leaks the slot of a call that failed",
        f"{ENGINE}/gating.py",
        "            self._gates.failed(self._gate, self._probe, str(error))\n",
        "            return\n",
        test=f"{PRESSED}::test_every_way_to_fail_gives_its_slot_back",
    ),
    Mutant(
        "a breaker that opened never lets a probe through",
        "src/carpool/pressure/breaker.py",
        "        return max(now, self.open_until, self._probed_at + PROBE_S)\n",
        "        return math.inf\n",
        test="tests/test_pressure.py",
    ),
    Mutant(
        "a breaker lets everybody probe",
        "src/carpool/pressure/breaker.py",
        "        return max(now, self.open_until, self._probed_at + PROBE_S)\n",
        "        return max(now, self.open_until)\n",
        test=f"{PRESSED}::test_one_call_at_a_time_asks_whether_the_provider_is_well",
    ),
    Mutant(
        "a 429 is ignored",
        f"{ENGINE}/gating.py",
        "REFUSALS = frozenset({429, 529})",
        "REFUSALS: frozenset[int] = frozenset()",
        test=f"{PRESSED}::test_calls_wait_for_the_time_that_was_named_and_then_go",
    ),
    Mutant(
        "a tag set keeps its turn",
        "src/carpool/pressure/line.py",
        "            self._queues[place.tags] = self._queues.pop(place.tags)  # behind the others again\n",
        "            pass\n",
        test="tests/test_pressure.py",
    ),
    Mutant(
        "everybody comes back in the moment that the gate opens",
        "src/carpool/pressure/throttle.py",
        "        if self.pressed or waited:\n",
        "        if self.pressed and waited and now < 0:\n",
        test="tests/test_pressure.py",
    ),
    Mutant(
        "retries have no budget",
        f"{ENGINE}/sending.py",
        "delay = max(delay, asked or 0.0, slot.retry_wait())",
        "delay = max(delay, asked or 0.0)",
        test=f"{PRESSED}::test_when_much_fails_not_all_of_it_is_tried_again_at_once",
    ),
    Mutant(
        "what was never sent is entered as a purchase",
        f"{ENGINE}/sending.py",
        "        if entry.purchase == UNSENT:\n",
        "        if entry.purchase > UNSENT:\n",
        test=f"{PRESSED}::test_what_was_never_sent_stands_in_no_ledger",
    ),
    Mutant(
        "an answer that shows no room holds nobody back",
        "src/carpool/pressure/meter.py",
        "        return self.limit == 0.0 or self.level(now)",
        "        return self.limit >= 0.0 or self.level(now)",
        test="tests/test_pressure.py",
    ),
    Mutant("a model is not part of the pool", "src/carpool/routing.py", '"" if mixes_models else call.model', '""'),
    Mutant(
        "an endpoint is not part of the pool",
        "src/carpool/routing.py",
        "        endpoint=call.endpoint,",
        "        endpoint=_FIRST.setdefault(call.provider, call.endpoint),",
        test="tests/test_routing.py",
    ),
    Mutant(
        "the second of two result files is not read",
        f"{ENGINE}/collecting.py",
        "in places:\n",
        "in places[:1]:\n",
        test=WORLDS.format("test_what_failed_stands_in_the_other_file"),
    ),
    Mutant(
        "a create that was cut is sent again with its file",
        f"{ENGINE}/buying.py",
        "            else:\n                await self._unknown(batch, str(error))\n        else:\n",
        "            elif again:\n                return False\n            else:\n"
        "                await self._unknown(batch, str(error))\n        else:\n",
        test=WORLDS.format("test_a_create_that_was_cut_is_looked_for_and_never_sent_again"),
    ),
    Mutant(
        "a batch that found no room is taken for one that was bought",
        f"{ENGINE}/following.py",
        "        if report.failure is not None:\n",
        "        if report.failure is not None and not report.failure.crowded:\n",
        test=WORLDS.format("test_what_finds_no_room_waits_for_it_and_costs_nothing"),
    ),
    Mutant(
        "the finished part of an expired batch is bought again",
        f"{ENGINE}/collecting.py",
        "            tally[line.result] += 1\n",
        '            if line.result == "succeeded" and self._desk.now() > (batch.expires_at or 1e99):\n'
        "                continue\n"
        "            tally[line.result] += 1\n",
        test=WORLDS.format("test_a_part_of_an_expired_batch_is_kept_and_the_rest_bought_anew"),
    ),
    Mutant(
        "whoever has a nonce is ours",
        "src/carpool/tracking.py",
        "if report.nonce == batch.nonce",
        "if report.nonce",
        test=WORLDS.format("test_what_is_not_ours_is_never_taken_for_it"),
    ),
    Mutant(
        "a stranger without a nonce is ours",
        "src/carpool/tracking.py",
        "if report.nonce == batch.nonce",
        'if report.nonce in (batch.nonce, "")',
        test=WORLDS.format("test_what_is_not_ours_is_never_taken_for_it"),
    ),
    Mutant(
        "a webhook is believed whoever signed it",
        "src/carpool/dialects/openai/hooks.py",
        "    if not any(hmac.compare_digest(signed, one)",
        "    if not signed and not any(hmac.compare_digest(signed, one)",
        test="tests/proxy/test_hooks.py",
    ),
    Mutant(
        "a webhook is never too old",
        "src/carpool/dialects/openai/hooks.py",
        "abs(int(stamp) - now) > TOLERANCE_S",
        "abs(int(stamp) - now) < 0",
        test="tests/proxy/test_hooks.py",
    ),
    Mutant(
        "a webhook wakes nobody",
        f"{ENGINE}/following.py",
        "self._ended_perhaps.add(self._desk.keyring.account(batch.key.credential))",
        "pass",
        test="tests/proxy/test_hooks.py",
    ),
    Mutant(
        "what flex refuses stands in the ledger as unknown",
        f"{ENGINE}/flexing.py",
        '        await self._desk.store.record(ledger.free(entry, "flex had no room"))\n',
        "",
        test=WORLDS.format("test_flex_that_has_no_room_is_free_and_another_lane_is_on_time"),
    ),
    Mutant(
        "flex that took too long is asked for as if for the first time",
        f"{ENGINE}/flexing.py",
        "Refused(EntryKind.RESCUE)",
        "Refused(EntryKind.PURCHASE)",
        test=WORLDS.format("test_flex_that_takes_too_long_is_a_rescue"),
    ),
    Mutant(
        "results that are promised are waited for for ever",
        f"{ENGINE}/following.py",
        "there - report.ended_at >= GONE_S",
        "there < 0",
        test=WORLDS.format("test_results_that_are_promised_and_never_named_are_not_waited_for"),
    ),
    Mutant(
        "a refusal leaves the pace as it was",
        "src/carpool/budget.py",
        "self._paced(max(1, self.rpm // 2))",
        "self",
        test="tests/test_budget.py",
    ),
    Mutant(
        "a create that was never sent is in doubt",
        f"{ENGINE}/buying.py",
        "            unsent=True,\n",
        "",
        test="tests/engine/test_openai_crashes.py",
    ),
    Mutant(
        "a create goes out before that is written down",
        f"{SQL}/batches.sql",
        "UPDATE batches SET unsent = 0, sent_at = :now\n",
        "UPDATE batches SET sent_at = :now\n",
        test="tests/engine/test_openai_crashes.py",
    ),
    Mutant(
        "a kept call on now has one try",
        f"{ENGINE}/sending.py",
        "self._desk.now() + KEPT_PATIENCE_S if patient else errand.deadline",
        "errand.deadline",
        test="tests/sim/test_seeds.py",
    ),
    Mutant(
        "a full queue is asked again at once",
        f"{ENGINE}/refusing.py",
        "        desk.queues.full(account, batch, refusal.queue_tokens, desk.now())\n",
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
