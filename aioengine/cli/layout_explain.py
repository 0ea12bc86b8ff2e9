"""`aioengine layout --explain RANK`: what one rank holds, and whom it talks to and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aioengine.cli.layout_facts import LayoutFacts, ModelFacts, counted, shown_bytes, shown_ranks
from aioengine.layers.partition import split_even, split_heads
from aioengine.layout import Axis, Coords, ParallelLayout

SHARED: Final[dict[Axis, str]] = {
    "dcp": "the KV cache of their tp group",
    "pcp": "the tokens of a prompt",
}


@dataclass(frozen=True, slots=True)
class Note:
    """`about` is a word or two, `text` a few sentences."""

    about: str
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Notes by heading."""

    title: str
    sections: dict[str, list[Note]]

    def json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            **{
                heading: {note.about: note.text for note in notes}
                for heading, notes in self.sections.items()
            },
        }


def explain(facts: LayoutFacts, rank: int) -> Explanation:
    """`rank` must be one of the launch."""
    layout = facts.layout
    place = layout.coords(rank)
    coords = ", ".join(
        f"{axis.replace('_', ' ')} {getattr(place, axis)}"
        for axis in Coords.__slots__
        if getattr(layout, f"{axis}_size") > 1 or axis in ("dp", "pp", "tp")
    )
    title = f"rank {rank} of {layout.launch_world_size}: {coords} (numbers count from 0)"
    sections = {
        "where it is": [*_place(facts, rank), _device(facts, rank)],
        "what it does": list(_roles(facts, rank)),
        "what it holds": list(_holdings(facts, rank)),
        "whom it talks to": list(_talks(facts, rank)),
        "if its process dies": [_death(facts, rank)],
    }
    return Explanation(title, sections)


# --- where it is


def _place(facts: LayoutFacts, rank: int) -> Iterator[Note]:
    layout = facts.layout
    place = layout.coords(rank)
    replica = layout.replica(rank)
    if layout.num_replicas == 1:
        yield Note("replica", f"The launch is one copy of the model: {_ranks(replica)}.")
    else:
        number = rank // layout.world_size
        yield Note(
            "replica",
            f"Replica {number} of {layout.num_replicas}: {_ranks(replica)}, a whole copy of the "
            "model that serves requests of its own.",
        )
    if layout.pp_size > 1:
        yield Note(
            "stage",
            f"Stage {place.pp} of {layout.pp_size}. Each has some of the layers, and every token "
            "passes through all of them.",
        )
    stage_mates = layout.group("tp", rank)
    if len(stage_mates) > 1:
        yield Note(
            "tp rank",
            f"Place {place.tp} of {layout.tp_size}. {_ranks(stage_mates).capitalize()} have the "
            "same layers, and each its own part of every matrix in them.",
        )


def _device(facts: LayoutFacts, rank: int) -> Note:
    choice, nodes = facts.config.device, facts.nodes
    if nodes is None:
        local, node = "N", "The launcher numbers the ranks of a node from 0 (local rank N); "
        node += f"--gpus-per-node tells which node rank {rank} is on. "
    else:
        local = str(nodes.local_rank(rank))
        node = f"Node {nodes.node_of(rank)} of {nodes.num_nodes}, local rank {local} there. "
    if choice == "cpu":
        return Note("device", f"{node}It computes on the CPU.")
    text = f"{node}It computes on cuda:{local}"
    if local != "0":
        text += " (cuda:0 when the launcher shows it one device only)"
    return Note(
        "device", f"{text}, or on the CPU where there is none." if choice == "auto" else f"{text}."
    )


# --- what it does


def _roles(facts: LayoutFacts, rank: int) -> Iterator[Note]:
    layout = facts.layout
    leader, output = layout.leader_of(rank), layout.output_rank_of(rank)
    peers = layout.replica(rank)[1:]
    if rank in facts.front_ends:
        yield Note(
            "front end",
            "It serves HTTP, renders templates, turns text into tokens and back, and gives every "
            f"request to one of the leaders ({_ranks(layout.leaders)}).",
        )
    if rank == leader:
        plans = f", which it sends to its peers ({_ranks(peers)})" if peers else ""
        yield Note(
            "leader",
            "It alone schedules for its replica: it owns the queue of requests and the book of KV "
            f"blocks, and makes the plan of every step{plans}.",
        )
    else:
        yield Note(
            "peer",
            f"It decides nothing. It runs the plans of its leader, rank {leader}, in the order in "
            "which they come, and enters no exchange with other ranks that no plan names.",
        )
    if rank == output:
        reports = "" if rank == leader else "; the ids go to the leader"
        yield Note(
            "output rank",
            "First tp rank of the last stage: it samples the next token of every request, and "
            f"keeps what that needs, such as penalty counts{reports}.",
        )


# --- what it holds


def _holdings(facts: LayoutFacts, rank: int) -> Iterator[Note]:
    layout, model = facts.layout, facts.model
    place = layout.coords(rank)
    ends = []
    if place.pp == 0:
        ends.append("the token embedding before the first")
    if place.pp == layout.pp_size - 1:
        ends.append("the norm and the vocabulary head after the last")
    if model is None:
        layers = "All" if layout.pp_size == 1 else f"About 1/{layout.pp_size} of all"
        yield Note("layers", _sentence(layers, ends))
        part = "All" if layout.tp_size == 1 else f"About 1/{layout.tp_size} of all"
        yield Note("of a layer", f"{part} attention heads, with their KV cache, and MLP columns.")
        yield Note("exactly", "--model tells layers, heads and bytes.")
        return
    stage = model.stages[place.pp]
    yield Note("layers", _sentence(f"{shown_ranks(stage.layers)} of {model.cfg.num_layers}", ends))
    yield Note("heads", _heads(model, place.tp, layout.tp_size))
    yield Note("columns", _columns(model, layout, place))
    yield Note(
        "weights",
        f"{shown_bytes(stage.weight_bytes)} ({stage.weight_bytes} bytes) in {model.dtype}, as much "
        "as every rank of its stage.",
    )
    yield Note("KV cache", _cache(model, place.pp))


def _sentence(start: str, ends: list[str]) -> str:
    return f"{start}, with {' and '.join(ends)}." if ends else f"{start}."


def _heads(model: ModelFacts, tp_rank: int, tp_size: int) -> str:
    """Attention heads in published numbers, and why local numbers may be larger."""
    cfg = model.cfg
    heads = split_heads(cfg.num_heads, cfg.num_kv_heads, tp_rank, tp_size)
    if tp_size == 1:
        return f"All {cfg.num_heads} query heads and {cfg.num_kv_heads} key/value heads."
    text = (
        f"{_span('query head', heads.q, cfg.num_heads)} and "
        f"{_span('key/value head', heads.kv, cfg.num_kv_heads)}, in every layer."
    )
    num_q, num_kv = heads.q[1] - heads.q[0], heads.kv[1] - heads.kv[0]
    if (num_q, num_kv) != (heads.num_local_heads, heads.num_local_kv_heads):
        text += (
            f" Memory is laid out for {heads.num_local_heads} and {heads.num_local_kv_heads}, the "
            "rest is zeros: all ranks of a tp group have the same shapes."
        )
    if tp_size > cfg.num_kv_heads:
        text += (
            f" With {tp_size} ranks for {cfg.num_kv_heads} key/value heads, several ranks hold a "
            "copy of the same one."
        )
    return text[:1].upper() + text[1:]


def _span(noun: str, span: tuple[int, int], total: int) -> str:
    start, stop = span
    if start == stop:
        return f"no {noun}"
    many = "s" if stop - start > 1 else ""
    return f"{noun}{many} {shown_ranks(range(start, stop))} of {total}"


def _columns(model: ModelFacts, layout: ParallelLayout, place: Coords) -> str:
    cfg = model.cfg
    columns = split_even(cfg.intermediate_size, place.tp, layout.tp_size, dim=0)
    text = f"{_count_of(columns.start, columns.stop, cfg.intermediate_size)} MLP columns of a layer"
    if place.pp in (0, layout.pp_size - 1):
        rows = split_even(cfg.vocab_size, place.tp, layout.tp_size, dim=0)
        text += f", {_count_of(rows.start, rows.stop, cfg.vocab_size)} rows of the vocabulary"
    return f"{text[:1].upper()}{text[1:]}."


def _count_of(start: int, stop: int, total: int) -> str:
    if stop - start == total:
        return f"all {total}"
    return f"{start}-{stop - 1} of the {total}" if stop > start else f"none of the {total}"


def _cache(model: ModelFacts, stage: int) -> str:
    """Bytes of a token and of a request of full length on one rank."""
    token_bytes = model.stages[stage].kv_token_bytes
    text = (
        f"{token_bytes} bytes for each token, {shown_bytes(model.max_model_len * token_bytes)} for "
        f"a request of {model.max_model_len} tokens."
    )
    room = model.kv_room
    if room is not None:
        text += (
            f" {shown_bytes(room.num_bytes)} of it on every rank leave room for {room.num_tokens} "
            "tokens in the replica."
        )
    return text


# --- whom it talks to


def _talks(facts: LayoutFacts, rank: int) -> Iterator[Note]:
    layout = facts.layout
    if layout.launch_world_size == 1:
        yield Note("nobody", "The launch is this one process.")
        return
    yield from _control(facts, rank)
    if layout.tp_size > 1:
        yield _tensor_parallel(facts, rank)
    for axis, shared in SHARED.items():
        mates = layout.group(axis, rank)
        if len(mates) > 1:
            yield Note(f"{axis} {shown_ranks(mates)}", f"They share {shared}.")
    if layout.pp_size > 1:
        yield _pipeline(facts, rank)
    if rank in layout.feedback_ranks(rank) and layout.world_size > 1:
        yield _feedback(facts, rank)
    yield from _replicas(facts, rank)


def _control(facts: LayoutFacts, rank: int) -> Iterator[Note]:
    """TCP connections between event loops, as opposed to what devices exchange."""
    layout = facts.layout
    leader = layout.leader_of(rank)
    others = [other for other in layout.leaders if other != rank]
    if rank in facts.front_ends and others:
        yield Note(
            _ranks(others, "leader"),
            "By control connection: requests and aborts go out, token ids and load come back.",
        )
    if rank != leader:
        results = "results of sampling" if rank == layout.output_rank_of(rank) else "replies"
        yield Note(
            f"leader {leader}",
            f"By control connection: plans come, {results} go back, heartbeats go both ways.",
        )
        return
    if layout.world_size > 1:
        yield Note(
            _ranks(layout.replica(rank)[1:], "peer"),
            "By control connection: plans go out, sampled ids come back from rank "
            f"{layout.output_rank_of(rank)}, heartbeats go both ways.",
        )
    clients = [other for other in facts.front_ends if other != rank]
    if clients:
        yield Note(
            _ranks(clients, "front end"),
            "By control connection: requests and aborts come, token ids and load go back.",
        )


def _tensor_parallel(facts: LayoutFacts, rank: int) -> Note:
    layout, model = facts.layout, facts.model
    place, mates = layout.coords(rank), layout.group("tp", rank)
    where, width = "in each layer", "hidden size"
    if model is not None:
        layers = model.stages[place.pp].layers
        where = f"in each of its {counted(len(layers), 'layer')}"
        width = str(model.cfg.hidden_size)
    text = (
        f"They compute together: two all-reduces {where}, after attention and after the MLP, add "
        f"up their partial sums of [tokens × {width}]."
    )
    if place.pp == 0:
        text += " One more joins the embedding, whose rows are spread over them."
    if place.pp == layout.pp_size - 1:
        text += " An all-gather joins their parts of the logits."
    return Note(f"tp {shown_ranks(mates)}", text + _distance(facts, mates))


def _pipeline(facts: LayoutFacts, rank: int) -> Note:
    layout, model = facts.layout, facts.model
    line, stage = layout.group("pp", rank), layout.coords(rank).pp
    width = "hidden size" if model is None else str(model.cfg.hidden_size)
    steps = []
    if stage > 0:
        steps.append(f"receives them from rank {line[stage - 1]} (stage {stage - 1})")
    if stage < layout.pp_size - 1:
        steps.append(f"sends them to rank {line[stage + 1]} (stage {stage + 1})")
    neighbours = line[max(0, stage - 1) : stage + 2]
    text = (
        f"Hidden states, [tokens × {width}] in every step, travel from stage to stage: it "
        f"{' and '.join(steps)}."
    )
    return Note(f"pp {shown_ranks(line)}", text + _distance(facts, neighbours))


def _feedback(facts: LayoutFacts, rank: int) -> Note:
    """Decisions 3 and 9 of the design: sampled ids have a communicator of their own."""
    ranks, output = facts.layout.feedback_ranks(rank), facts.layout.output_rank_of(rank)
    embedding = [other for other in ranks if other != output]
    if rank == output:
        text = f"It hands the ids that it samples to {_ranks(embedding)} to be embedded"
    else:
        text = f"It gets the ids that rank {output} samples, to embed them"
    text += (
        " in the next step: with async scheduling the leader plans that step before it knows them."
    )
    return Note(f"feedback {shown_ranks(ranks)}", text + _distance(facts, ranks))


def _replicas(facts: LayoutFacts, rank: int) -> Iterator[Note]:
    layout = facts.layout
    if layout.dp_size > 1:
        yield Note(
            f"dp {shown_ranks(layout.group('dp', rank))}",
            "They hold the same part of each replica. In a dense model they exchange nothing at "
            "run time and have no communicator.",
        )
    experts = layout.group("ep", rank)
    if len(experts) > 1:
        yield Note(
            f"ep {shown_ranks(experts)}",
            "In a mixture of experts they would share the experts of their stage (and, as eplb, "
            "move them about). A dense model has none, and asking for this group is an error.",
        )
    if layout.external_dp_size > 1:
        yield Note("external dp", "Launches side by side share no request and no communicator.")


def _distance(facts: LayoutFacts, ranks: Sequence[int]) -> str:
    """A sentence, when it is known where ranks are."""
    if facts.nodes is None:
        return ""
    nodes = facts.nodes.nodes_of(ranks)
    if len(nodes) == 1:
        return f" All of it stays on node {nodes[0]}."
    return f" It goes over the network, between nodes {shown_ranks(nodes)}."


def _death(facts: LayoutFacts, rank: int) -> Note:
    layout = facts.layout
    replica = layout.replica(rank)
    clients = " Clients of its HTTP server see their connections close."
    if list(facts.front_ends) == [rank] and len(replica) < layout.launch_world_size:
        return Note("the launch", f"It ends: no other rank has a front end.{clients}")
    if layout.num_replicas == 1:
        text = "It ends within seconds: a replica cannot go on without one of its ranks."
        return Note("the launch", text + (clients if rank in facts.front_ends else ""))
    text = (
        f"{_ranks(replica).capitalize()} end within seconds, and their requests end with an error. "
        "The other replicas go on."
    )
    return Note("its replica", text + (clients if rank in facts.front_ends else ""))


def _ranks(ranks: Sequence[int], noun: str = "rank") -> str:
    return f"{noun}{'s' if len(ranks) > 1 else ''} {shown_ranks(ranks)}"
