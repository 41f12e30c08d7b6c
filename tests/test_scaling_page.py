"""The arithmetic of docs/scaling.md: bytes counted message by message give its formulas."""

import scaling_page as page

L, H, P, S, W = 2**12, 64, 8, 32, 16  # steps, channels, devices, numbers of state, window to each side
FLOAT = 4
PIECE = L // P * H * FLOAT  # bytes of one tensor on one device


def test_convolutions_send_every_piece_but_their_own():
    """There and back, forward and backward: to each other device its share of the channels."""
    sent = sum(PIECE // P for _ in ("there", "back") for _ in ("forward", "backward") for _ in range(P - 1))
    assert page.transposed(L, H, P) == sent


def test_a_ring_passes_on_what_came():
    tensors = {"forward": ("K", "V"), "backward": ("K", "V", "dK", "dV")}
    assert page.ring(L, H, P) == sum(PIECE for hops in tensors.values() for _ in hops for _ in range(P - 1))


def test_heads_change_places_four_times_forward_and_backward():
    assert page.by_heads(L, H, P) == sum(PIECE // P for _ in "QKVO" * 2 for _ in range(P - 1))


def test_a_scan_sends_its_state_in_rounds_that_double():
    rounds = [distance for distance in (1, 2, 4, 8) if distance < P]
    assert page.carried(S, P) == 2 * len(rounds) * S * FLOAT
    assert page.carried(S, P) < page.halo(W, H) < page.transposed(L, H, P) < page.by_heads(L, H, P)


def test_a_halo_is_two_tensors_and_their_gradients_to_two_neighbours():
    assert page.halo(W, H) == 2 * len(("K", "V", "dK", "dV")) * W * H * FLOAT


def test_gradients_go_round_twice():
    assert page.gradients(1000, P) == 2 * (P - 1) * (1000 / P) * FLOAT


def test_attention_is_two_products_a_pair_of_steps():
    forward = 2 * 2 * L * L * H  # scores and sums, a multiplication and an addition each
    assert page.attention(L, H, L) == 3.5 * forward
    assert page.convolution(2 * L, H) > 2 * page.convolution(L, H) > 0
    assert page.scan(2 * L, S, H) == 2 * page.scan(L, S, H)


def test_numbers_are_written_with_three_digits():
    assert [page.text(n, "B") for n in (512, 1024, 469_762_048, 8e10)] == ["512 B", "1.02 kB", "470 MB", "80 GB"]
