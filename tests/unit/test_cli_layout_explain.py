"""`aioengine layout --explain`: what is said of a rank."""

import itertools

import pytest

from aioengine.cli.layout_explain import explain
from aioengine.cli.layout_facts import LayoutFacts, ModelFacts, StageFacts
from aioengine.cli.main import main
from aioengine.config import EngineConfig
from aioengine.layout import Nodes, ParallelLayout
from aioengine.model_config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    family="llama",
    name="like SmolLM2",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)


def model_facts(*layers: range) -> ModelFacts:
    """With round numbers for bytes."""
    stages = tuple(StageFacts(span, 1000, 10) for span in layers)
    return ModelFacts(MODEL, "bfloat16", 8192, 900, stages, None)


def said(
    layout: ParallelLayout,
    rank: int,
    *,
    nodes: Nodes | None = None,
    model: ModelFacts | None = None,
    **settings: str,
) -> dict[str, str]:
    """All notes by their subject."""
    explanation = explain(LayoutFacts(EngineConfig(**settings), layout, nodes, model), rank)
    return {
        note.about: note.text
        for note in itertools.chain.from_iterable(explanation.sections.values())
    }


GRID = ParallelLayout(dp_size=2, pp_size=3, tp_size=2)


def test_a_leader_with_the_front_end() -> None:
    notes = said(GRID, 0)
    assert "(ranks 0,6)" in notes["front end"]
    assert "peers (ranks 1-5)" in notes["leader"]
    assert "requests and aborts go out" in notes["leader 6"]
    assert "sampled ids come back from rank 4" in notes["peers 1-5"]
    assert "two all-reduces" in notes["tp 0-1"]
    assert "joins the embedding" in notes["tp 0-1"]
    assert "logits" not in notes["tp 0-1"]
    assert "it sends them to rank 2 (stage 1)" in notes["pp 0,2,4"]
    assert "ids that rank 4 samples" in notes["feedback 0-1,4"]
    assert "exchange nothing" in notes["dp 0,6"]
    assert "A dense model has none" in notes["ep 0-1,6-7"]
    assert "no other rank has a front end" in notes["the launch"]
    assert not notes.keys() & {"peer", "output rank", "pcp", "dcp", "external dp"}


def test_a_peer_in_the_middle() -> None:
    notes = said(GRID, 9)
    assert "leader, rank 6" in notes["peer"]
    assert "plans come, replies go back" in notes["leader 6"]
    assert "receives them from rank 7 (stage 0) and sends them to rank 11" in notes["pp 7,9,11"]
    assert notes["its replica"].startswith("Ranks 6-11 end")
    assert not [about for about in notes if about.startswith("feedback")]
    assert not notes.keys() & {"front end", "leader", "output rank", "the launch"}


def test_an_output_rank() -> None:
    notes = said(GRID, 10)
    assert "the ids go to the leader" in notes["output rank"]
    assert "results of sampling go back" in notes["leader 6"]
    assert "An all-gather joins their parts of the logits." in notes["tp 10-11"]
    assert "it receives them from rank 8 (stage 1)." in notes["pp 6,8,10"]
    assert "it samples to ranks 6-7 to be embedded in" in notes["feedback 6-7,10"]


def test_a_leader_without_a_front_end_and_one_with() -> None:
    layout = ParallelLayout(dp_size=2)
    notes = said(layout, 1)
    assert "requests and aborts come" in notes["front end 0"]
    assert "The other replicas go on." in notes["its replica"]
    notes = said(layout, 1, api_ranks="leaders")
    assert "every request" in notes["front end"]
    assert notes.keys() >= {"leader 0", "front end 0"}
    assert "connections close" in notes["its replica"]


def test_one_process() -> None:
    notes = said(ParallelLayout(), 0)
    assert notes["nobody"] == "The launch is this one process."
    assert notes.keys() >= {"front end", "leader", "output rank"}
    assert notes["layers"].startswith("All, with the token embedding")


def test_axes_that_share_a_cache_a_prompt_or_nothing() -> None:
    layout = ParallelLayout(external_dp_size=2, pcp_size=2, tp_size=4, dcp_size=2)
    notes = said(layout, 6)
    assert "KV cache" in notes["dcp 6-7"]
    assert "prompt" in notes["pcp 2,6"]
    assert "share no request" in notes["external dp"]


def test_where_a_rank_computes() -> None:
    assert "--gpus-per-node tells" in said(GRID, 5)["device"]
    nodes = Nodes(3, 4)
    device = said(GRID, 5, nodes=nodes)["device"]
    assert device.startswith("Node 1 of 3, local rank 1 there. It computes on cuda:1 (cuda:0 when")
    assert device.endswith("or on the CPU where there is none.")
    assert said(GRID, 4, nodes=nodes, device="cuda")["device"].endswith("It computes on cuda:0.")
    assert said(GRID, 5, nodes=nodes, device="cpu")["device"].endswith("It computes on the CPU.")


def test_what_goes_over_the_network() -> None:
    notes = said(GRID, 4, nodes=Nodes(3, 4))
    assert notes["tp 4-5"].endswith("All of it stays on node 1.")
    assert notes["pp 0,2,4"].endswith("It goes over the network, between nodes 0-1.")
    notes = said(GRID, 4, nodes=Nodes(6, 2))
    assert notes["feedback 0-1,4"].endswith("It goes over the network, between nodes 0,2.")


def test_layers_and_heads_of_a_model() -> None:
    model = model_facts(range(15), range(15, 30))
    layout = ParallelLayout(pp_size=2, tp_size=2)
    first, second = (said(layout, rank, model=model) for rank in (0, 3))
    assert first["layers"] == "0-14 of 30, with the token embedding before the first."
    assert second["layers"].startswith("15-29 of 30, with the norm and the vocabulary head")
    assert first["heads"] == "Query heads 0-5 of 9 and key/value heads 0-1 of 3, in every layer."
    assert second["heads"].startswith("Query heads 6-8 of 9 and key/value head 2 of 3, in")
    assert "Memory is laid out for 6 and 2, the rest is zeros" in second["heads"]
    assert second["columns"] == (
        "768-1535 of the 1536 MLP columns of a layer, 24576-49151 of the 49152 rows of the "
        "vocabulary."
    )
    assert "two all-reduces in each of its 15 layers" in second["tp 2-3"]
    assert "[tokens × 576]" in second["pp 1,3"]
    assert first["weights"].startswith("1000 B (1000 bytes) in bfloat16")
    assert first["KV cache"] == "10 bytes for each token, 80 KiB for a request of 8192 tokens."


def test_more_ranks_than_heads() -> None:
    model = model_facts(range(30))
    layout = ParallelLayout(tp_size=16)
    everything = [said(layout, rank, model=model)["heads"] for rank in range(16)]
    assert all("hold a copy of the same one" in text for text in everything)
    assert sum(text.startswith("No query head") for text in everything) == 16 - 9


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "-tp", "2", "-pp", "2", "--explain", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "rank 3 of 4: dp 0, pp 1, tp 1 (numbers count from 0)"
    assert "whom it talks to" in out
    assert any("partial sums of [tokens × hidden size]" in line for line in out), "no markup"
    assert max(map(len, out)) > 150, "a paragraph is a line where there is no terminal"


@pytest.mark.parametrize("api_ranks", ["rank0", "leaders"])
def test_every_rank_of_many_grids_can_be_explained(api_ranks: str) -> None:
    model = model_facts(range(10), range(10, 30))
    for external_dp, dp, pcp, tp in itertools.product((1, 2), (1, 2), (1, 2), (1, 4)):
        layout = ParallelLayout(
            external_dp_size=external_dp, dp_size=dp, pp_size=2, pcp_size=pcp, tp_size=tp
        )
        nodes = Nodes.fit(layout.launch_world_size, nodes=None, gpus_per_node=3)
        for rank in range(layout.launch_world_size):
            notes = said(layout, rank, nodes=nodes, model=model, api_ranks=api_ranks)
            assert all(text.endswith(".") for text in notes.values())
            assert ("leader" in notes) == (rank in layout.leaders)
            assert ("output rank" in notes) == (rank == layout.output_rank_of(rank))
