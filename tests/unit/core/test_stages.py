import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.core.stages import split_layers


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "sizes"),
    [(30, 1, [30]), (30, 2, [15, 15]), (30, 4, [7, 8, 8, 7]), (7, 4, [2, 2, 2, 1]), (5, 2, [3, 2])],
)
def test_extra_layers_go_to_the_stages_before_the_last(
    num_layers: int, pp_size: int, sizes: list[int]
) -> None:
    assert [len(span) for span in split_layers(num_layers, pp_size, None)] == sizes


@given(st.data())
def test_every_layer_has_one_stage(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 80))
    spans = split_layers(num_layers, data.draw(st.integers(1, num_layers)), None)
    assert [layer for span in spans for layer in span] == list(range(num_layers))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    assert len(spans[-1]) == min(map(len, spans))


def test_override() -> None:
    assert split_layers(8, 3, (1, 5, 2)) == (range(1), range(1, 6), range(6, 8))
    with pytest.raises(ValueError, match=r"--pipeline-layers 1,5,3 .* 9, the model has 8"):
        split_layers(8, 3, (1, 5, 3))


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="--pipeline-parallel-size 3"):
        split_layers(2, 3, None)
