"""Scheduler: decides what each step computes (plan) and what its result means (commit).

The one rule: a running request's ``num_computed`` catches up with the tokens that it has, under one token budget per
step, and when nothing is left to compute the step samples. There is no prefill and no decode. Five hooks, and no
branch for any feature: the policy, the admission predicates, the KvManager, ``lookahead`` and ``budget(now)``.

Who is served. Running requests go by pending tokens, ascending, then urgency: decodes before chunks, so that no early
partial prefill takes the whole budget. Equals that a step cannot all serve take turns (who was served longest ago is
first). A request is admitted only with budget that is left when every running one is served in full; so running
requests are never more than the budget, and under a steady budget each is served at every step. When the budget
shrinks under its hook, nobody joins those who take turns. Hence no starvation.

Why preemption ends. A victim is the last in policy order, so the first in order is never one while others run; and
alone it always finds its blocks, because ``_limit`` keeps a request within the pool. So the first in order always gets
on, finishes, and makes the next one first. (A waiting request that ranks before all running ones is admitted next:
nobody passes the head of the queue.) There are few preemptions, too: one happens only when a request needs a block
for a newly sampled token, a resumed request gets the blocks of its whole context at once, and output tokens are kept.
So each block boundary of each request costs one preemption that frees a block, at most: in all, no more than the blocks
that all requests would take side by side. (A victim that shares all of its blocks frees none; another follows.)
That holds whoever the victims are, so also where the order moves (fair, lpm).

Groups. The samples of one prompt (n > 1) and the beams of one search stand next to each other in arrival order. A victim's whole group gives
way, because only then are the blocks free that it shares; unless the needy one is of the same group: then, of samples, the victim alone does,
and of beams again all, who cannot get on without each other. So the first in order, with its group, is never a victim while others run, and
what was said holds with "group" for "request", and as many preemptions at a boundary as a group has members. Samples are admitted one by one.
Beams are admitted and resumed only as a whole (scheduler/groups.py), with slots and blocks for all and a budget that serves them all, unless
nothing else runs: then they take turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from octavo.config import NO_BLOCK, SchedulerConfig
from octavo.core.output import Delta
from octavo.core.request import Request, State
from octavo.core.step import IN, PlanItem, SlotResult, StepPlan, StepResult
from octavo.errors import ConfigError, ContextTooLong, InvalidRequest
from octavo.kv.manager import NO_MATCH, KvManager, Match
from octavo.kv.tier import SwapTier
from octavo.observe.events import Admitted, Event, Finished, Preempted, TierFailed
from octavo.scheduler.admission import Predicted
from octavo.scheduler.beams import check_room, most_tokens
from octavo.scheduler.groups import BeamGroup
from octavo.scheduler.invariants import check
from octavo.scheduler.itl import ItlBudget
from octavo.scheduler.parts import compare, introduce, rows_to_score
from octavo.scheduler.policy import Policy, make_policy
from octavo.scheduler.preempt import Preempter, PreemptionStats
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.times import StepTimes

AdmissionPredicate = Callable[[Request], bool]


@dataclass(slots=True)
class Counters:
    """Totals since the start, written by the Scheduler only."""

    steps: int = 0  # plans made
    tokens_planned: int = 0  # rows of all forward passes
    tokens_sampled: int = 0  # output tokens committed
    preemptions: int = 0
    tokens_lost: int = 0  # computed tokens that preemptions threw away; the cache may have kept them
    tokens_recomputed: int = 0  # computed tokens that were computed once more, after a preemption
    blocks_out: int = 0  # moved to the swap tier
    blocks_in: int = 0  # moved back
    cache_queries: int = 0  # prompt tokens that were looked up in the prefix cache, each once: not again after a preemption
    cache_hits: int = 0  # of them: found


class _Part(msgspec.Struct, frozen=True, gc=False):
    """A request's part of the plan being made. It may yet be taken out, by a preemption."""

    take: int  # tokens
    new_blocks: list[int]


class Scheduler:
    """Decides which tokens of which requests each step computes. Plain data in, plain data out; it never logs.

    ``plan`` may be called again before the last plan's result is committed; results are committed in plan order.
    ``admission``: a request at the head of the queue is admitted only when all of these say yes; while one says no,
    nobody passes it. ``lookahead``: token slots to reserve beyond the known ones (where a drafter writes). ``budget``:
    the token budget at a time, at most ``max_num_batched_tokens``, which is also the default. ``tier``: where victims' blocks
    may go, and ``block_seconds`` a first guess of what moving one takes. Policy, the predicate of
    predicted admission and the budget of ``target_itl_ms`` are made from ``config`` where they are not given.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvManager,
        policy: Policy | None = None,
        *,
        admission: Sequence[AdmissionPredicate] = (),
        lookahead: int = 0,
        budget: Callable[[float], int] | None = None,
        tier: SwapTier | None = None,
        block_seconds: float = 0.0,
    ) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(config, name)}", name)
        self.config = config
        self.kv = kv
        self.policy = policy or make_policy(config.policy, cached_tokens=self.cached_tokens, weights=dict(config.tenant_weights))
        self.counters = Counters()
        self.waiting = WaitingQueue(self.policy)
        self.running: list[Request] = []
        self._predicted = Predicted(self.running, kv) if config.admission == "predicted" else None
        self._admission: list[AdmissionPredicate] = [*admission, *([self._predicted] if self._predicted else [])]
        self._lookahead = lookahead
        self._times, full = StepTimes(), config.max_num_batched_tokens
        itl = None if config.target_itl_ms is None else ItlBudget(config.target_itl_ms, full, self.running, self._times)
        self._budget = budget or itl
        self._preempter = Preempter(config.preemption_mode, kv.block_size, tier, self._times, full, block_seconds)
        self._requests: dict[str, Request] = {}  # waiting and running
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))  # free ones, the next at the end
        self._freed: list[int] = []  # given up since the last plan
        self._events: list[Event] = []  # since the last plan, or the last take_events
        self._in_flight: dict[int, list[Request]] = {}  # plan number → whose items it has, in order
        self._sealed: dict[int, list[bytes]] = {}  # plan number → keys of the blocks that it completes, where there are any
        self._parked: dict[str, list[Request]] = {}  # whose fork → those that wait, outside the queue, for its prompt to be computed
        self._copies: dict[Request, tuple[int, int]] = {}  # the block (from, to) that must be copied for its next item
        self._trunks: list[BeamGroup] = []  # resumed, and the others may wait for the leader to compute what all share
        self._arrivals = 0
        self._turn = 0  # rises with each item of each plan

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, or were preempted."""
        return len(self._requests) - len(self.running)

    def add(self, request: Request) -> None:
        """Put a request into the queue; a beam, once its whole group is here.

        Raises: InvalidRequest for an empty prompt, an id in use or more beams than may run; ContextTooLong when the prompt leaves
        no room for one output token in the context, or does not fit the KV pool.
        """
        length, context, capacity = request.num_prompt, self.config.max_model_len, self.kv.capacity
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id!r} is in use by an unfinished request", "request_id")
        if length == 0:
            raise InvalidRequest("the prompt has no tokens; at least 1 is needed", "prompt")
        if length >= context:
            raise ContextTooLong(
                f"the prompt has {length} tokens, the context {context}: at most {context - 1} leave room for an output token", "prompt"
            )
        if length > capacity:
            raise ContextTooLong(
                f"the prompt has {length} tokens, the KV pool holds {capacity} ({self.kv.pool.num_blocks} blocks of "
                f"{self.kv.block_size}): shorten it or raise num_kv_blocks",
                "prompt",
            )
        if request.max_total <= length:
            raise InvalidRequest(f"max_total is {request.max_total}, the prompt alone has {length} tokens: no token may follow", "max_tokens")
        # Fixed by the pool's size, not by what else runs: a request ends at the same token in any company.
        width, sliding = request.params.beam_width, self.kv.window is not None
        limit = min(request.max_total, context, most_tokens(length, width, self.kv.pool.num_blocks, self.kv.block_size, sliding=sliding))
        if request.params.use_beam_search:
            self._check_beams(request)
        self._arrivals += 1
        request.order, request.limit = self._arrivals, limit
        request.block_keys = self.kv.root(request.cache_salt, request.adapter)
        self._requests[request.id] = request
        parent = self._requests.get(request.fork_of)
        if request.params.use_beam_search:
            group = request.group = BeamGroup(request, self.kv.block_size) if parent is None else parent.group
            assert group is not None
            if parent is not None:
                group.members.append(request)
            if group.complete:
                self._enqueue(group.leader)
        elif parent is not None:
            self._parked.setdefault(parent.id, []).append(request)
        else:
            self._enqueue(request)

    def _check_beams(self, request: Request) -> None:
        """Whether a beam's group can ever run, and is here. Raises: InvalidRequest, ContextTooLong."""
        width, most = request.params.beam_width, self.config.max_num_seqs
        if width > most:
            raise InvalidRequest(
                f"beam search with {width} beams needs as many sequences at once; at most {most} run (max_num_seqs)", request.params.width_field
            )
        check_room(request.num_prompt, width, self.kv.pool.num_blocks, self.kv.block_size, sliding=self.kv.window is not None)
        if request.fork_of:
            parent = self._requests.get(request.fork_of)
            if parent is None or parent.group is None or parent.group.complete:
                raise InvalidRequest(f"the beam search that {request.id!r} is of has ended, or has all of its {width} beams", "request_id")

    def abort(self, request_id: str) -> list[Delta]:
        """End a request now, wherever it is, and with a beam its whole group. Their last Deltas; none when it is unknown or has ended already."""
        request = self._requests.get(request_id)
        return [] if request is None else self._give_up(request, "abort", None)

    def cached_tokens(self, request: Request) -> int:
        """Tokens that the prefix cache would spare this request now. Changes nothing."""
        scored = request.params.prompt_logprobs is None or request.num_scored >= request.num_prompt - 1
        return self.kv.match(request.tokens, request.block_keys).num_tokens if scored else 0

    def reset_cache(self) -> int:
        """Forget all that is cached. What requests have computed, or their forks will take over, they keep, also in the tier, and nobody finds
        it. Returns how many blocks became free."""
        for request in self._requests.values():
            source = self._requests.get(request.fork_of, request)
            if source.state is State.RUNNING or source.preemptions or request.preemptions:
                request.block_keys = None
        return self.kv.reset_cache()

    def preemption_stats(self) -> PreemptionStats:
        """What preemptions did since the start."""
        c, tier = self.counters, self._preempter.tier
        held = (0, 0, 0) if tier is None else (tier.num_slots, tier.num_used, tier.num_requests)
        return PreemptionStats(c.preemptions, c.tokens_lost, c.tokens_recomputed, c.blocks_out, c.blocks_in, *held)

    def take_events(self) -> list[Event]:
        """What happened since the last plan. Without this call it is in the next plan's ``events``."""
        events, self._events = self._events, []
        return events

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step, and write down that it will be computed. None when no request can get on: nobody is
        there, the budget is 0, a predicate says no, or all that is left is in flight. Freed slots and events then wait
        for the next plan.
        """
        for parent_id in list(self._parked):
            if (parent := self._requests[parent_id]).num_computed >= parent.num_prompt:
                self._unpark(parent)
        if self._trunks:
            self._trunks = [group for group in self._trunks if not group.take_trunk(self.kv, self._come_back)]
        chosen: dict[Request, _Part] = {}
        budget = self._serve_running(self._now(now), chosen)
        keys: list[bytes] = []
        if self.kv.prefix_caching:  # only now: no preemption can undo a part any more
            for request, part in chosen.items():
                keys += self._seal(request, request.num_computed + part.take)
        self._admit_waiting(budget, chosen, keys)
        return self._build(chosen, keys) if chosen else None

    def _seal(self, request: Request, end: int) -> list[bytes]:
        """Let others find what is computed once this step has run, as far as its tokens are known. Returns the new keys."""
        known = len(request.tokens)  # tokens in flight, and drafts, come later
        return self.kv.seal(request.id, request.tokens, end if end < known else known)

    def _now(self, now: float) -> int:
        limit = self.config.max_num_batched_tokens
        return limit if self._budget is None else min(self._budget(now), limit)

    def _serve_running(self, budget: int, chosen: dict[Request, _Part]) -> int:
        """Give running requests their tokens. Returns the budget that is left."""
        urgency, kv, lookahead = self.policy.urgency, self.kv, self._lookahead
        queue = [(r.num_pending, urgency(r.head), r.served, r.order, r) for r in self.running]  # order differs: requests are never compared
        queue.sort()
        for pending, _, _, _, request in queue:
            if budget <= 0:
                break
            if request.state is not State.RUNNING:
                continue  # preempted a moment ago
            if pending == 0 or (request.ahead and len(request.tokens) + request.ahead >= request.limit):
                continue  # all is in flight
            take = pending if pending < budget else budget
            used = request.num_computed + take
            reserve = min(used + lookahead, request.limit - 1) if lookahead else 0
            kv.slide(request.id, request.num_computed)
            while (new_blocks := kv.grow(request.id, used, reserve)) is None:
                cause = self._shortage(request, max(used, reserve))
                for victim in self._victims(request):
                    gone = chosen.pop(victim, None)
                    budget += gone.take if gone else 0
                    self._preempt(victim, cause)
                if request.state is not State.RUNNING:
                    break
            if new_blocks is not None:
                chosen[request] = _Part(take, new_blocks)
                budget -= take
        return budget

    def _admit_waiting(self, budget: int, chosen: dict[Request, _Part], keys: list[bytes]) -> None:
        """Start or resume requests, in policy order, with the budget that is left. Nobody passes one that must wait.

        The blocks of the whole known context are taken at once, and one more must be there (unless the request can
        never use it): so nobody starts only to be preempted in the middle of its prompt for want of its own blocks.
        """
        if budget <= 0 or not self._slots or not len(self.waiting):
            return
        self.policy.refresh(self.waiting)
        budget -= sum(request.group is not None and request not in chosen for request in self.running)  # beams that a later step serves
        while budget > 0 and self._slots:
            request = self.waiting.first()
            if request is None or not all(allows(request) for allows in self._admission):
                return
            group = request.group
            if group is not None and (len(self._slots) < group.width or (budget < group.width and self.running)):
                return
            length, most = len(request.tokens), request.limit - 1
            scored = request.params.prompt_logprobs is None or request.num_scored >= request.num_prompt - 1
            fork = self._fork(request)
            match = fork or (self.kv.match(request.tokens, request.block_keys) if scored else NO_MATCH)  # what must be scored must be computed
            room = max(min(length + self.kv.block_size, most), min(length + self._lookahead, most))
            reserve = 0 if group is None else group.reserve(self.kv)
            more = (group.width - 1) * reserve * self.kv.block_size if group is not None else 0
            table = self.kv.admit(request.id, match, min(length + self._lookahead, most), room + more, request.block_keys)
            if table is None:
                return
            self.waiting.remove(request)
            self._seat(request)
            start = match.num_tokens
            if match.tail is not None:
                self._preempter.copy(match.tail, table[len(match.blocks)])
            if request.preemptions:
                start = self._come_back(request, table, start, length if scored else request.num_scored)
            else:
                if fork is None:
                    request.num_cached = match.num_tokens
                    if scored and request.block_keys is not None:
                        self.counters.cache_queries += length
                        self.counters.cache_hits += match.num_tokens
                self.policy.charge(request, length - start, 0)
            request.num_computed = start
            take = min(length - start, budget)
            self.kv.grow(request.id, start + take)
            keys += self._seal(request, start + take)  # the next one admitted may use it
            chosen[request] = _Part(take, table)
            budget -= take
            found, forked = (0, match.num_tokens) if fork else (match.num_tokens, 0)
            self._events.append(Admitted(request.id, request.slot, found, request.preemptions > 0, forked, start - match.num_tokens))
            if group is not None:
                budget -= self._seat_others(group, reserve)

    def _seat(self, request: Request) -> None:
        """Give a request that has a table a slot: it runs."""
        self.running.append(request)
        request.state = State.RUNNING
        request.slot = self._slots.pop()
        request.fresh, request.idle = True, False
        request.known = len(request.tokens)

    def _come_back(self, request: Request, table: list[int], cached: int, most: int) -> int:
        """Fill a preempted request's table from the tier, beyond what the cache had of it. Returns the tokens that it has then."""
        start, moved = self._preempter.come_back(request, table, cached, most, self.counters.steps + 1)
        self.counters.blocks_in += moved
        return start

    def _seat_others(self, group: BeamGroup, reserve: int) -> int:
        """Give the beams of a group whose leader was admitted their slots, and ``reserve`` blocks each. Returns how many they are."""
        for request in group.others:
            table = self.kv.admit(request.id, NO_MATCH, reserve * self.kv.block_size)
            assert table is not None  # room was there
            self._seat(request)
            request.idle = True
            self._events.append(Admitted(request.id, request.slot, 0, request.preemptions > 0))
        if group.waits:
            self._trunks.append(group)
        return group.width - 1

    def _fork(self, request: Request) -> Match | None:
        """What a sample takes over from another of its prompt, which runs and has computed it in earlier steps; else None.

        With the prefix cache alone it would find the full blocks; but that may be off, and what is in the prompt's last
        block it would compute again. A resumed one is matched: its own tokens may be cached, too.
        """
        parent = self._requests.get(request.fork_of) if request.fork_of else None
        if parent is None or parent.state is not State.RUNNING or parent.num_computed < request.num_prompt or request.preemptions:
            return None
        if parent.fresh:
            return None  # resumed in this plan: what it found in the cache may be filled by this step, and copies are made before
        # Its last row is computed again, with its own seed: never for a prompt of one token.
        start = request.num_prompt - 1
        return self.kv.fork(parent.id, start) if start > 0 and self.kv.reaches(parent.id, start) else None

    def _unpark(self, parent: Request) -> None:
        """Those that waited for this one's prompt go to their places in the queue."""
        for request in self._parked.pop(parent.id, ()):
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        """A new request joins the queue: from now on the policy knows it."""
        self.policy.arrived(request, self.waiting)
        self.waiting.push(request)

    def _shortage(self, needy: Request, tokens: int) -> str:
        """Why somebody has to give way, in words."""
        pool = self.kv.pool
        return f"{needy.id} needed {self.kv.blocks_for(tokens)} blocks for {tokens} tokens, {pool.num_available} of {pool.num_blocks} were free"

    def _victims(self, needy: Request) -> list[Request]:
        """Who gives way together to one that needs blocks: the group of the last in policy order."""
        victim = self.policy.victim([request for request in self.running if request is request.head])
        if victim.group is not None:
            return list(victim.group.members)
        root = victim.fork_of or victim.id
        samples = [request for request in self.running if (request.fork_of or request.id) == root]
        return [victim] if needy in samples else samples

    def _preempt(self, victim: Request, cause: str, *, sound: bool = True) -> None:
        """Take a running request's blocks and slot; it goes back to its place in the queue and computes anew what neither
        the tier nor, by then, the cache has kept. Not ``sound``: what is in its blocks is not known.

        Output tokens are kept. Rank and arrival order stay, so it is resumed before whoever came later.
        """
        if sound and victim in self._copies:
            self._preempter.copy(*self._copies.pop(victim))  # before its blocks are moved out
        away = self._preempter.give_way(victim, self.kv.table(victim.id), self.counters.steps + 1, sound=sound)
        freed, lost = self._leave_slot(victim, sound), victim.num_computed - away.tokens
        self._events.append(Preempted(victim.id, cause, lost, freed, away.how, away.blocks, away.seconds))
        self.counters.preemptions += 1
        self.counters.tokens_lost += lost
        self.counters.blocks_out += away.blocks
        victim.num_computed = 0
        victim.preemptions += 1
        victim.state = State.WAITING
        if victim is victim.head:
            self.waiting.push(victim)

    def _leave_slot(self, request: Request, sound: bool = True) -> int:
        """Give up slot and blocks, and make every result in flight stale. Returns the blocks that nobody uses any more."""
        self.running.remove(request)
        self._slots.append(request.slot)
        self._vacate(request)
        request.slot = -1
        if request.group is not None:
            self._forget_rows(request.group)
        request.epoch += 1
        request.ahead = 0
        return self.kv.release(request.id, sound)

    def _vacate(self, request: Request) -> None:
        """What the runner knows of the request in a slot no longer holds."""
        if not request.fresh:  # else it knows nothing
            self._freed.append(request.slot)
        self._copies.pop(request, None)

    def _forget_rows(self, group: BeamGroup) -> None:
        group.reset()
        if group in self._trunks:
            self._trunks.remove(group)

    def _build(self, chosen: dict[Request, _Part], keys: list[bytes]) -> StepPlan:
        """Turn the choice into a plan, and advance the requests as if it were computed."""
        number = self.counters.steps = self.counters.steps + 1
        items, charge, total = [], self.policy.charge, 0
        for request, part in chosen.items():
            take, new_blocks = part.take, part.new_blocks
            if request in self._copies:
                self._preempter.copy(*self._copies.pop(request))
            start = request.num_computed
            end = request.num_computed = start + take
            sample = end == len(request.tokens) + request.ahead
            if start >= request.known:
                items.append(PlanItem(request.slot, request.epoch, start, [-1], sample, new_blocks))
            else:
                init = None
                if request.fresh:
                    init, new_blocks, request.fresh = introduce(request), self.kv.table(request.id), False
                rows = rows_to_score(request, start, end)
                items.append(PlanItem(request.slot, request.epoch, start, request.tokens[start:end], sample, new_blocks, init, 0, *rows))
            self._turn += 1
            request.served = self._turn
            if sample:
                request.ahead += request.group is None  # what comes after a beam is not known before its group has selected
                charge(request.head, 0, 1)
            total += take
        self.counters.tokens_planned += total
        freed, self._freed = self._freed, []
        self._in_flight[number] = list(chosen)
        if keys:
            self._sealed[number] = keys
        return StepPlan(number, items, freed, self.take_events(), self._preempter.take_moves())

    # -- results -------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Delta]:
        """Take in what a plan's execution found. Returns the news of each request that has any.

        Results of requests that were preempted or have ended since are dropped.

        Raises: WorkerDied when the result does not answer the plan (nothing is changed then).
        """
        compare(plan, result)
        if result.failed_moves:
            self._tier_failed(plan, result)
        self._sealed.pop(plan.number, None)
        seconds, tokens = result.seconds - result.swap_seconds, plan.num_tokens
        self._times.add(tokens, seconds)
        preempter = self._preempter
        preempter.committed(plan, result)
        deltas = []
        for request, item, found in zip(self._in_flight.pop(plan.number), plan.items, result.slots, strict=True):
            if request.epoch != item.epoch:
                continue
            if found.error is not None:
                deltas += self._give_up(request, "error", found.error)
                continue
            if item.score_to > item.score_from:
                request.num_scored = item.score_to
            if request.preemptions:
                again, recovered = preempter.computed(request, item, seconds / tokens)
                self.counters.tokens_recomputed += again
                if recovered is not None:
                    self._events.append(recovered)
            if item.sample and request.group is None:
                deltas.append(self._append(request, found))
                continue
            if found.prompt_logprobs:
                deltas.append(Delta(request.id, prompt_logprobs=found.prompt_logprobs, num_cached=request.num_cached))
            if item.sample and request.group is not None:
                deltas += self._row_in(request.group, request, found)
        return deltas

    def _row_in(self, group: BeamGroup, request: Request, found: SlotResult) -> list[Delta]:
        """A beam's row is in. With the last of its group's the search selects the next beams, or is over."""
        self.counters.tokens_sampled += 1
        assert found.logprobs is not None
        if not group.row_in(request, found.logprobs[0]):
            return []
        moved = group.select(self.kv)
        if moved is None:
            return [self._end(self._requests[delta.request_id], delta) for delta in group.deltas()]
        for heir, copy in moved:
            self._vacate(heir)
            heir.epoch += 1
            heir.fresh = True
            if copy is not None:
                self._copies[heir] = copy
        return []

    def _append(self, request: Request, found: SlotResult) -> Delta:
        """A sampled token becomes a token of the request, which may be its last."""
        token = found.tokens[0]
        request.tokens.append(token)
        request.ahead -= 1
        self.counters.tokens_sampled += 1
        reason, stop_reason = self._finish_reason(request, token)
        delta = Delta(request.id, found.tokens, found.logprobs, found.prompt_logprobs or None, reason, stop_reason, request.num_cached)
        return delta if reason is None else self._end(request, delta)

    def _finish_reason(self, request: Request, token: int) -> tuple[str | None, int | None]:
        """Whether this newest token ends the request, and why: (finish_reason, stop_reason)."""
        params = request.params
        if (token in request.eos_ids or token in params.stop_token_ids) and request.num_output >= params.min_tokens:
            if token in request.eos_ids and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        return ("length", None) if len(request.tokens) >= request.limit else (None, None)

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """End every request that has a part in a plan which could not be executed. Returns their last deltas.

        It is not known how far the plan got, so its ``freed`` slots are named again in the next one. What it was to compute is in
        no cache and what it was to move out in no tier, nor what plans in flight after it built on that: requests of theirs
        that hold such blocks start anew.
        """
        blocks, back = self._distrust(plan.number, plan.number)
        self._preempter.lost(plan)
        deltas = []
        ended = set()
        for request, item in zip(self._in_flight.pop(plan.number), plan.items, strict=True):
            if request.epoch == item.epoch:
                ended.add(request.id)
                deltas += self._give_up(request, "error", message, sound=False)
        self._start_anew(f"step {plan.number} failed", blocks, back | ended)
        taken = {request.slot for request in self.running if not request.fresh}
        self._freed.extend(slot for slot in plan.freed if slot not in self._freed and slot not in taken)
        return deltas

    def _tier_failed(self, plan: StepPlan, result: StepResult) -> None:
        """Moves of a step failed: the tier is given up. What could not be moved out is lost; who could not be brought back has
        computed on nothing, and so has who shared that."""
        if not self._preempter.failed:
            self._preempter.failed = True
            self._events.append(TierFailed(result.moves_error))
        filled = any(move.kind == IN for move in plan.moves)  # perhaps from a slot that this very plan could not write
        blocks, back = self._distrust(plan.number, plan.number if filled else plan.number + 1)
        self._start_anew(f"the swap tier failed in step {plan.number}", blocks, back)

    def _distrust(self, plan: int, since: int) -> tuple[set[int], set[str]]:
        """What this plan and those in flight after it moved out is in no tier any more, and what plan ``since`` and those after it
        computed in no cache. Returns the blocks that hold anything now, and who was brought back by ``since`` or later."""
        blocks = self.kv.forget([key for number in list(self._sealed) if number >= since for key in self._sealed.pop(number)])
        back = self._preempter.distrust(plan, since)
        for request_id in back:
            blocks.update(self.kv.table(request_id))
        blocks.discard(NO_BLOCK)
        return blocks, back

    def _start_anew(self, why: str, blocks: set[int], requests: set[str]) -> None:
        """Those of these requests that run, who forked them, and who holds one of these blocks."""
        for request in list(self.running):
            if request.state is not State.RUNNING:
                continue  # with its group, a moment ago
            if request.id in requests or request.fork_of in requests or not blocks.isdisjoint(self.kv.table(request.id)):
                for each in [request] if request.group is None else list(request.group.members):
                    self._preempt(each, f"{why}, on which {request.id} depends", sound=False)

    def _give_up(self, request: Request, reason: str, error: str | None, *, sound: bool = True) -> list[Delta]:
        """End a request, and with a beam its whole group, before its time."""
        family = [request] if request.group is None else list(request.group.members)
        return [
            self._end(each, Delta(each.id, finish_reason=reason, error=error, num_cached=each.num_cached), sound=sound) for each in family
        ]

    def _end(self, request: Request, delta: Delta, *, sound: bool = True) -> Delta:
        """The one way out: everything the request held is given up. Returns its last delta. Not ``sound``: what is in its blocks is not known."""
        known = request is request.head  # to the policy
        if request.state is State.RUNNING:
            self._leave_slot(request, sound)
        else:
            if request in self.waiting:
                self.waiting.remove(request)
            else:  # parked, or one of a group that its leader stands for or that is not complete
                known = False
                if siblings := self._parked.get(request.fork_of):
                    siblings.remove(request)
            request.epoch += 1
        request.state = State.FINISHED
        del self._requests[request.id]
        self._preempter.forget(request.id)
        assert delta.finish_reason is not None
        if known:
            self.policy.ended(request)
        self._unpark(request)
        if self._predicted is not None:
            self._predicted.ended(request, delta.finish_reason)
        self._events.append(Finished(request.id, delta.finish_reason))
        return delta

    def check(self) -> None:
        """Restate the invariants from nothing (scheduler/invariants.py). Raises: AssertionError, saying what is wrong."""
        check(self)
