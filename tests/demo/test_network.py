"""The network is the one that transformers loads, and padding and grouping change nothing."""

from pathlib import Path

import pytest
import torch

from moiety_demo.balance import balance_loss, focus_loss
from moiety_demo.folder import DemoCheckpointError, load_folder, save_folder
from moiety_demo.muon import Muon, orthogonalize
from moiety_demo.network import DemoNetwork, NetworkConfig, Routing
from moiety_demo.primitives import normalize, rotate
from moiety_demo.tokenizer import build_tokenizer, render_prompt

SMALL = {"hidden_size": 32, "num_layers": 2, "num_experts": 4, "expert_hidden_size": 24, "head_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, spread widely enough for differences to show."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    network = DemoNetwork(NetworkConfig(tokenizer.get_vocab_size(), **SMALL, init_std=0.3))
    for name, parameter in network.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = tmp_path_factory.mktemp("model")
    save_folder(network, tokenizer, path)
    return path


@torch.inference_mode()
def test_transformers_computes_the_same_logits(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network, tokenizer = load_folder(folder)
    tokens = torch.tensor([tokenizer.encode('Reverse the word "moiety", please. 12, 345').ids])
    hidden, _ = network([tokens])
    torch.testing.assert_close(network.logits(hidden), model(tokens).logits[0], atol=1e-4, rtol=1e-4)


def test_transformers_renders_and_encodes_a_conversation_alike(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    _, ours = load_folder(folder)
    messages = [("system", "Be brief."), ("user", "Hi! I am Anna."), ("assistant", "Hello Anna!"), ("user", "2 + 2?")]
    rendered = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], add_generation_prompt=True, tokenize=False
    )
    assert rendered == render_prompt(messages)
    assert theirs(rendered)["input_ids"] == ours.encode(rendered).ids


@torch.inference_mode()
def test_padding_and_grouping_do_not_change_a_sequences_states(folder: Path) -> None:
    network, _ = load_folder(folder)
    short, long = torch.randint(0, 300, (1, 5)), torch.randint(0, 300, (1, 9))
    padded = torch.cat([torch.cat([short, torch.zeros(1, 4, dtype=torch.int64)], dim=1), long])
    together, _ = network([padded])
    apart, _ = network([short, long])
    torch.testing.assert_close(torch.cat([together[:5], together[9:]]), apart, atol=1e-5, rtol=1e-4)


def test_the_weights_come_back_as_stored(folder: Path, tmp_path: Path) -> None:
    network, tokenizer = load_folder(folder)
    save_folder(network, tokenizer, tmp_path / "copy")
    again, _ = load_folder(tmp_path / "copy")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoCheckpointError, match="train one"):
        load_folder(tmp_path)


def test_a_folder_of_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DemoCheckpointError, match="llama"):
        load_folder(tmp_path)


def test_the_gradients_of_the_primitives_are_right() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.double, requires_grad=True)
    weight = torch.randn(8, dtype=torch.double, requires_grad=True)
    cos, sin = torch.randn(2, 5, 1, 4, dtype=torch.double)
    assert torch.autograd.gradcheck(lambda x, w: normalize(x, w, 1e-6), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))


def test_even_routing_has_balance_one_and_single_minded_conversations_have_no_entropy() -> None:
    sequence_T = torch.tensor([0, 0, 1, 1, -1])
    expert_TK = torch.tensor([[0], [0], [1], [1], [0]])
    probability_TE = torch.nn.functional.one_hot(expert_TK.squeeze(1), 2).float()
    routing = Routing(probability_TE, expert_TK)
    assert balance_loss([routing], sequence_T).item() == pytest.approx(1.0)
    assert focus_loss([routing], sequence_T).item() == pytest.approx(0.0, abs=1e-6)
    lopsided = Routing(probability_TE, torch.zeros_like(expert_TK))
    lopsided.probability_TE = torch.tensor([[1.0, 0.0]]).repeat(5, 1)
    assert balance_loss([lopsided], sequence_T).item() == pytest.approx(2.0)


def test_focus_above_a_floor_is_all_that_counts() -> None:
    even = Routing(torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]]))
    sequence_T = torch.tensor([0, 0, 1, 1])
    assert focus_loss([even], sequence_T, floor=0.75).item() == pytest.approx(0.25)
    assert focus_loss([even], sequence_T, floor=1.0).item() == pytest.approx(0.0, abs=1e-6)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(6, 12, 20)))
    assert (values > 0.5).all()
    assert (values < 1.5).all()


def test_muon_treats_a_matrix_and_its_transpose_alike() -> None:
    start, gradient = torch.randn(3, 5), torch.randn(3, 5)
    wide, tall = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.T.clone())
    wide.grad, tall.grad = gradient.clone(), gradient.T.clone()
    muon = Muon([wide, tall], weight_decay=0.1)
    muon.lr = 0.1
    muon.step()
    torch.testing.assert_close(wide, tall.T)
    assert not torch.equal(wide, start)
