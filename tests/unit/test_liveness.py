"""Liveness of tensors in a forward and a backward, for operations written by hand."""

from __future__ import annotations

from mtrain.models.graph import Graph, Tensor
from mtrain.models.liveness import backward, backwards, forward, forwards


def test_liveness_gradient_spans_reader_to_maker() -> None:
    """Follow x 1 -> linear -> 10 -> activation -> 100, and a sum with x, whose gradient is passed
    on.
    """
    g = Graph()
    x = Tensor(1)
    middle = Tensor(10)
    wide = Tensor(100)
    out = Tensor(1)
    g.add("linear", [x], reads=[x], gives=[middle], works=5)
    g.add("activation", [middle], reads=[middle], gives=[wide])
    g.add("fold", [wide], reads=[wide], gives=[added := Tensor(1)])
    g.add("sum", reads=[x, added], gives=[out], passes=True)
    held, transient = zip(*((m.held, m.transient) for m in backward(g)), strict=True)
    assert held == (0, 0, -100, -110, -111)
    assert transient == (1, 101, 111, 17, 1), (
        "the sum's; and the fold's; and the activation's; the linear layer's; x's"
    )
    assert sum(backwards([g, g]).peak) == 101
    assert backwards([g, g]).end == -222


def test_liveness_consumed_gradient_counts_only_if_held() -> None:
    def most(*, again: bool) -> int:
        g = Graph()
        x = Tensor(1)
        y = Tensor(10)
        with g.recomputed("activation", x, when=again):
            g.add("activation", [], reads=[x], gives=[y], works=100, spent=True)
        g.add("loss", reads=[y])
        return backwards([g]).peak.transient

    assert most(again=False) == 101
    assert most(again=True) == 111, "who computes again holds the gradient of what was given"


def test_liveness_forward_tensor_lives_until_read() -> None:
    g = Graph()
    x = Tensor(1)
    rows = Tensor(50)
    out = Tensor(10)
    g.add("permute", [x], gives=[rows])
    g.add("product", [out], reads=[rows], gives=[out], needs=7)
    assert forward(g) == 57, "the rows and what the product needs, on top of saved tensors"
    assert forwards([g, g]) == 57
    g.add("norm", [Tensor(100)], reads=[out])
    assert forward(g) == 0, "there is more at its end than on its way"


def test_liveness_recomputed_forward_counts_again() -> None:
    g = Graph()
    x = Tensor(1)
    rows = Tensor(50)
    out = Tensor(10)
    with g.recomputed("layer", x):
        g.add("permute", reads=[x], gives=[rows])
        g.add("product", [kept := Tensor(20)], reads=[rows], gives=[out])
    moments = list(backward(g))
    assert kept.bytes == moments[0].held
    assert moments[0].transient == 60, "rows and what comes out"
    assert max(map(sum, moments)) == 80


def test_liveness_view_is_its_memory_with_own_gradient() -> None:
    g = Graph()
    x = Tensor(1)
    both = Tensor(30)
    parts = [Tensor(20, of=both), Tensor(10, of=both)]
    g.add("linear", [x], reads=[x], gives=[both])
    g.add("split", reads=[both], gives=parts)
    g.add("attention", parts, reads=parts, gives=[Tensor(5)])
    assert sum(t.bytes for t in g.kept()) == 31
    assert [m.transient for m in backward(g)][:2] == [35, 60], (
        "of the result and of both parts; of these and of the whole"
    )
