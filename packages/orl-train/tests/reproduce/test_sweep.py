"""What dev chooses."""

from orl_train.reproduce.sweep import Choice, choose, most_accurate


def test_the_fastest_point_at_the_floor_is_chosen(point):
    slow = point(threshold=0.9, accuracy=0.99, tpf=2.0)
    fast = point(threshold=0.7, accuracy=0.985, tpf=5.0)
    wrong = point(threshold=0.5, accuracy=0.98, tpf=9.0)
    assert most_accurate([wrong, fast, slow]) is slow
    assert choose([wrong, fast, slow], 0.985) == Choice(fast, True)
    assert choose([wrong, fast, slow], 0.99 - 0.005) == Choice(fast, True)


def test_below_the_floor_the_most_accurate_point_stands_in(point):
    slow, fast = point(accuracy=0.9, tpf=2.0), point(accuracy=0.9, tpf=3.0)
    assert choose([slow, fast], 0.95) == Choice(fast, False)
