"""The training-free selectors against their formulas, written as plain loops over one image."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from medtokenbudget.errors import CountError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.routing import TokenBatch, create_selector
from medtokenbudget.routing.selectors.ats import sampled
from tests.routing.batches import tokens_of

N, K = 20, 7


def batch() -> TokenBatch:
    """Clustered patches: two images whose patches are near one of five centers."""
    noise = torch.Generator().manual_seed(3)
    tokens = tokens_of(2, (4, 5), 6)
    centers = torch.randn(2, 5, 6, generator=noise)[:, torch.arange(N) % 5]
    return replace(tokens, patches=centers + 0.4 * torch.randn(2, N, 6, generator=noise))


def mean(vectors: list[torch.Tensor], weights: list[float] | None = None) -> torch.Tensor:
    weights = weights or [1.0] * len(vectors)
    return sum(w * v for w, v in zip(weights, vectors)) / sum(weights)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b) / float(a.norm() * b.norm())


def ranked(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def same_groups(assignment: torch.Tensor, groups: list[set[int]]) -> bool:
    found: dict[int, set[int]] = {}
    for patch, group in enumerate(assignment.tolist()):
        if group >= 0:
            found.setdefault(group, set()).add(patch)
    return sorted(map(sorted, found.values())) == sorted(map(sorted, groups))


def each(tokens: TokenBatch):
    for row in range(len(tokens)):
        yield row, list(tokens.patches[row]), tokens.cls_attention[row].tolist()


def test_evit_keeps_the_most_attended_patches_and_fuses_the_others_by_attention():
    tokens = batch()
    selection = create_selector("evit").select(tokens, K)
    for row, x, attention in each(tokens):
        order = ranked(attention)
        expected = [x[i] for i in order[: K - 1]]
        expected.append(mean([x[i] for i in order[K - 1 :]], [attention[i] for i in order[K - 1 :]]))
        torch.testing.assert_close(selection.tokens[row], torch.stack(expected))
        assert selection.weights[row].tolist() == [1.0] * (K - 1) + [N - K + 1]


def test_evit_with_one_token_is_the_attention_pooled_image_and_with_all_tokens_changes_nothing():
    tokens = batch()
    one = create_selector("evit").select(tokens, 1).tokens[:, 0]
    attention = tokens.cls_attention / tokens.cls_attention.sum(1, keepdim=True)
    torch.testing.assert_close(one, torch.einsum("bn,bnd->bd", attention, tokens.patches))
    whole = create_selector("evit").select(tokens, N)
    torch.testing.assert_close(whole.tokens, torch.take_along_dim(tokens.patches, ranks(tokens).unsqueeze(-1), 1))


def ranks(tokens: TokenBatch) -> torch.Tensor:
    return tokens.cls_attention.argsort(1, descending=True)


def test_evit_fuses_patches_that_have_no_attention_at_all():
    tokens = replace(batch(), cls_attention=torch.zeros(2, N))
    selection = create_selector("evit").select(tokens, K)
    torch.testing.assert_close(selection.tokens[:, -1], tokens.patches[:, K - 1 :].mean(1))


def test_frequency_keeps_the_patches_of_the_high_pass_attention_and_a_dc_token():
    noise = torch.Generator().manual_seed(5)
    attention = torch.rand(2, N, N, generator=noise).mul(4).softmax(-1)
    tokens = replace(batch(), received_attention=attention.mean(1))
    selection = create_selector("frequency").select(tokens, K)
    for row, x, _ in each(tokens):
        high_pass = [sum(float(attention[row, i, j]) - 1 / N for i in range(N)) for j in range(N)]
        order = ranked(high_pass)
        expected = [x[i] for i in order[: K - 1]] + [mean([x[i] for i in order[K - 1 :]])]
        torch.testing.assert_close(selection.tokens[row], torch.stack(expected))


def test_ats_keeps_the_patches_whose_cumulative_significance_is_nearest_to_evenly_spaced_samples():
    tokens = batch()
    kept = create_selector("ats").select(tokens, K).kept
    for row, _, attention in each(tokens):
        significance = [a * float(norm) for a, norm in zip(attention, tokens.value_norm[row])]
        total = sum(significance)

        def hits(samples: int, significance=significance, total=total) -> set[int]:
            reached, sums = 0.0, {}
            for i in reversed(ranked(significance)):  # from the least significant patch on
                reached += significance[i]
                sums[i] = reached / total
            points = [(2 * sample + 1) / (2 * samples) for sample in range(samples)]
            return {min(sums, key=lambda i, point=point: abs(sums[i] - point)) for point in points}

        assert any(set(kept[row].nonzero().flatten().tolist()) == hits(samples) for samples in range(K, 200))


def test_rollout_ranks_by_the_stored_signal():
    tokens = batch()
    order = create_selector("rollout").order(tokens)
    assert order.tolist() == [ranked(values) for values in tokens.rollout.tolist()]


@pytest.mark.parametrize("name", ["tome", "pitome", "atc"])
def test_mergers_compare_keys_where_they_are_asked_to(name):
    tokens = batch()
    by_keys = create_selector(name, compare="keys").select(tokens, K)
    # Merging depends on the keys alone: with the keys as patches, the patches fall into the same groups.
    alike = create_selector(name).select(replace(tokens, patches=tokens.mean_key, cls=None), K)
    assert torch.equal(by_keys.assignment, alike.assignment)
    for row in range(2):
        for group in range(K):
            members = tokens.patches[row][by_keys.assignment[row] == group]
            torch.testing.assert_close(by_keys.tokens[row, group], members.mean(0))
    with pytest.raises(MissingSignalError, match="with `signals` mean_key"):
        create_selector(name, compare="keys").select(replace(tokens, mean_key=None), K)
    with pytest.raises(UnknownNameError, match="compare"):
        create_selector(name, compare="values")


def test_ats_samples_are_proportional_to_significance():
    # Sums 0.1, 0.3, 0.6 and 1: of two samples 0.25 is nearest to 0.3 and 0.75 to 0.6; four samples, from 0.125 on, hit all.
    significance = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    assert sampled(significance, 4).tolist() == [[True] * 4]
    assert sampled(significance, 2).tolist() == [[False, True, True, False]]


def test_ats_keeps_exactly_k_where_attention_is_zero_almost_everywhere():
    attention = torch.zeros(2, N)
    attention[:, 3] = 1
    kept = create_selector("ats").select(replace(batch(), cls_attention=attention), K).kept
    assert kept.sum(1).tolist() == [K, K]
    assert bool(kept[:, 3].all())


def test_tps_squeezes_pruned_patches_into_their_most_similar_host():
    tokens = batch()
    selection = create_selector("tps").select(tokens, K)
    for row, x, attention in each(tokens):
        order = ranked(attention)
        kept, pruned = order[:K], order[K:]
        host = {i: max(kept, key=lambda j, i=i, x=x: cosine(x[i], x[j])) for i in pruned}
        for place, j in enumerate(kept):
            guests = [i for i in pruned if host[i] == j]
            weights = [math.e] + [math.exp(cosine(x[i], x[j])) for i in guests]
            expected = mean([x[j], *(x[i] for i in guests)], weights)
            torch.testing.assert_close(selection.tokens[row, place], expected, atol=1e-5, rtol=1e-5)
            assert selection.weights[row, place] == 1 + len(guests)


def test_pitome_merges_among_the_patches_of_highest_energy():
    tokens, margin, r = batch(), 0.45, 6
    selection = create_selector("pitome").select(tokens, N - r)
    for row, x, _ in each(tokens):
        energies = []
        for i in range(N):
            similar = [cosine(x[i], x[j]) for j in range(N) if j != i]
            energies.append(sum(s if s >= margin else math.exp(s - margin) - 1 for s in similar) / (N - 1))
        order = ranked(energies)
        sources, targets = order[: 2 * r : 2], order[1 : 2 * r : 2]
        groups = {i: {i} for i in range(N) if i not in sources}
        for i in sources:
            groups[max(targets, key=lambda j, i=i, x=x: cosine(x[i], x[j]))].add(i)
        assert same_groups(selection.assignment[row], list(groups.values()))
        for group, token in zip((sorted(groups)), selection.tokens[row]):
            torch.testing.assert_close(token, mean([x[i] for i in groups[group]]), atol=1e-5, rtol=1e-5)


def test_pitome_protects_an_isolated_patch_that_tome_may_merge():
    patches = torch.cat([torch.eye(8)[:1].repeat(9, 1), torch.eye(8)[5:6]])[None]
    selection = create_selector("pitome").select(TokenBatch(patches, (2, 5)), 5)
    lonely = selection.assignment[0, 9]
    assert selection.weights[0, lonely] == 1


def test_diffrate_drops_the_least_attended_and_merges_the_next():
    tokens = batch()
    selection = create_selector("diffrate").select(tokens, K)
    for row, x, attention in each(tokens):
        order = ranked(attention)
        gone = int(0.5 * (N - K))
        kept, merged, dropped = order[:K], order[K : N - gone], order[N - gone :]
        groups = {j: [j] for j in kept}
        for i in merged:
            groups[max(kept, key=lambda j, i=i, x=x: cosine(x[i], x[j]))].append(i)
        for place, j in enumerate(kept):
            torch.testing.assert_close(selection.tokens[row, place], mean([x[i] for i in groups[j]]), atol=1e-5, rtol=1e-5)
        assert sorted((selection.assignment[row] < 0).nonzero().flatten().tolist()) == sorted(dropped)


@pytest.mark.parametrize("dropped", [0.0, 1.0])
def test_diffrate_at_its_ends_only_merges_or_only_drops(dropped):
    tokens = batch()
    selection = create_selector("diffrate", dropped=dropped).select(tokens, K)
    assert selection.weights.sum(1).tolist() == [N if dropped == 0 else K] * 2
    with pytest.raises(RequestError, match="dropped must be in"):
        create_selector("diffrate", dropped=1.5)


def test_dpc_knn_takes_density_peaks_as_centers():
    tokens, neighbors = batch(), 5
    selection = create_selector("dpc-knn").select(tokens, K)
    for row, x, _ in each(tokens):
        squared = [[float((a - b).square().sum()) / len(a) for b in x] for a in x]
        density = [math.exp(-sum(sorted(squared[i])[1 : neighbors + 1]) / neighbors) for i in range(N)]
        peaks = []
        for i in range(N):
            denser = [math.sqrt(squared[i][j]) for j in range(N) if density[j] > density[i]]
            peaks.append(density[i] * (min(denser) if denser else math.sqrt(max(squared[i]))))
        centers = ranked(peaks)[:K]
        groups: dict[int, set[int]] = {c: set() for c in centers}
        for i in range(N):
            groups[min(centers, key=lambda c, i=i, s=squared: s[i][c])].add(i)
        for place, center in enumerate(centers):
            expected = mean([x[i] for i in groups[center]])
            torch.testing.assert_close(selection.tokens[row, place], expected, atol=1e-5, rtol=1e-5)


def test_dpc_knn_gives_k_groups_of_identical_patches():
    selection = create_selector("dpc-knn").select(TokenBatch(torch.ones(1, 20, 4), (4, 5)), 6)
    assert sorted(selection.weights[0].tolist()) == [1, 1, 1, 1, 1, 15]
    torch.testing.assert_close(selection.tokens, torch.ones(1, 6, 4))


def test_k_medoids_alternates_assignment_and_medoids():
    tokens = batch()
    selection = create_selector("k-medoids", iterations=3).select(tokens, K)
    for row, x, attention in each(tokens):
        squared = [[float((a - b).square().sum()) for b in x] for a in x]

        def assigned(medoids: list[int], squared=squared) -> list[list[int]]:
            groups: list[list[int]] = [[] for _ in medoids]
            for i in range(N):
                nearest = [squared[i][medoid] for medoid in medoids]
                groups[nearest.index(min(nearest))].append(i)
            return groups

        medoids = ranked(attention)[:K]
        for _ in range(3):
            groups = assigned(medoids)
            medoids = [min(g, key=lambda i, g=g, s=squared, a=attention: sum(a[j] * s[i][j] for j in g)) for g in groups]
        assert torch.equal(selection.tokens[row], tokens.patches[row, medoids])
        assert same_groups(selection.assignment[row], [set(g) for g in assigned(medoids)])


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
def test_atc_merges_the_closest_pair_of_clusters_until_k_are_left(linkage):
    tokens = batch()
    selection = create_selector("atc", linkage=linkage).select(tokens, K)
    reduce = {"average": lambda d: sum(d) / len(d), "complete": max, "single": min}[linkage]
    for row, x, _ in each(tokens):
        clusters = [{i} for i in range(N)]
        while len(clusters) > K:
            pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
            distance = {(a, b): reduce([1 - cosine(x[i], x[j]) for i in clusters[a] for j in clusters[b]]) for a, b in pairs}
            a, b = min(pairs, key=distance.__getitem__)
            clusters[b] |= clusters.pop(a)
        assert same_groups(selection.assignment[row], clusters)
        for group in clusters:
            token = selection.tokens[row, selection.assignment[row, min(group)]]
            torch.testing.assert_close(token, mean([x[i] for i in group]), atol=1e-5, rtol=1e-5)
    with pytest.raises(UnknownNameError, match="linkage"):
        create_selector("atc", linkage="ward")


def test_box_prior_ranks_by_the_distance_to_the_lesions_box():
    lesion = torch.zeros(2, 20, dtype=torch.bool)
    lesion[0, [6, 12]] = True  # rows 1 and 2, columns 1 and 2 of a 4 x 5 grid
    tokens = replace(batch(), lesion=lesion)
    order = create_selector("box-prior").order(tokens)

    def distance(i: int, top: int, bottom: int, left: int, right: int) -> float:
        y, x = divmod(i, 5)
        return max(abs(y - (top + bottom) / 2) / (bottom - top + 1), abs(x - (left + right) / 2) / (right - left + 1))

    assert order[0].tolist() == sorted(range(20), key=lambda i: (distance(i, 1, 2, 1, 2), i))
    assert set(order[0, :4].tolist()) == {6, 7, 11, 12}
    # No lesion patch: the box is the image.
    assert order[1].tolist() == sorted(range(20), key=lambda i: (distance(i, 0, 3, 0, 4), i))
    with pytest.raises(MissingSignalError, match="1 of 2"):
        create_selector("box-prior").select(replace(tokens, has_mask=torch.tensor([True, False])), K)


@pytest.mark.parametrize(("name", "option"), [("dpc-knn", "neighbors"), ("k-medoids", "iterations")])
def test_counts_below_one_are_rejected(name, option):
    with pytest.raises(CountError, match=option):
        create_selector(name, **{option: 0})
