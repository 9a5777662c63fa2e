"""habitat-baselines' VER and DD-PPO as peers of peers.py, which starts this where habitat-baselines
can be imported.

Trainers, storages, workers and PPO are its own. The environment enters through habitat-lab's
GymRegistryEnv and old gym, the network through the registry of policies: the encoders of peers.py,
an embedding of the previous action, and habitat-baselines' LSTM, action head and value head. This
module is imported in every worker process (fork server): that is how they know policy, environment
and data set.
"""

import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
# for the fork server
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])

import gym  # noqa: E402  the old one, which habitat-lab is made for
import numpy as np  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
from habitat import Dataset, registry  # noqa: E402
from habitat_baselines.common.baseline_registry import baseline_registry  # noqa: E402
from habitat_baselines.rl.models.rnn_state_encoder import build_rnn_state_encoder  # noqa: E402
from habitat_baselines.rl.ppo.policy import Net, NetPolicy  # noqa: E402
from torch import nn  # noqa: E402

CONFIG = """# @package _global_
defaults:
  - /benchmark/nav/pointnav: pointnav_gibson
  - /habitat_baselines: habitat_baselines_rl_config_base
  - _self_
habitat:
  env_task: GymRegistryEnv
  env_task_gym_dependencies: []
  env_task_gym_id: HabitatPeer-v0
  dataset: {type: Peers-v0}
habitat_baselines:
  trainer_name: %(trainer)s
  num_environments: %(num_envs)d
  num_updates: -1
  total_num_steps: %(steps)d
  num_checkpoints: -1
  force_torch_single_threaded: True
  verbose: False
  log_interval: 1000000
  checkpoint_interval: 1000000
  rl:
    policy: {main_agent: {name: PeersPolicy}}
    preemption: {save_resume_state_interval: 1000000}
    ver: {variable_experience: True, num_inference_workers: 1, overlap_rollouts_and_learn: False}
    ppo: {
      num_steps: %(num_steps)d, ppo_epoch: %(epochs)d, num_mini_batch: %(minibatches)d,
      hidden_size: %(hidden)d, lr: %(lr)g, eps: 1e-5, max_grad_norm: 0.5,
      use_double_buffered_sampler: %(double_buffered)s, reward_window_size: 50,
      clip_param: 0.2, value_loss_coef: 0.5, entropy_coef: 0.01,
      use_gae: True, gamma: 0.99, tau: 0.95, use_normalized_advantage: False,
      use_linear_clip_decay: False, use_linear_lr_decay: False}
    ddppo: {
      distrib_backend: GLOO, backbone: resnet18, rnn_type: LSTM, num_recurrent_layers: 1,
      train_encoder: True}
"""


def old_space(space):
    """A Gymnasium space as one of gym 0.23."""
    if hasattr(space, "spaces"):
        return gym.spaces.Dict({key: old_space(part) for key, part in space.spaces.items()})
    if hasattr(space, "n"):
        return gym.spaces.Discrete(int(space.n))
    return gym.spaces.Box(space.low, space.high, space.shape, space.dtype.type)


class OldGymEnv(gym.Env):
    """The environment of peers.py behind gym 0.23's interface."""

    metadata = {"render_modes": []}

    def __init__(self):
        self.env = peers.make_env()
        self.next_seed = None
        self.observation_space = old_space(self.env.observation_space)
        self.action_space = old_space(self.env.action_space)

    def seed(self, seed=None):
        self.next_seed = seed
        return [seed]

    def reset(self, **_):
        seed = self.next_seed
        self.next_seed = None
        observation, _ = self.env.reset(seed=seed)
        return observation

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward), terminated or truncated, info


if "HabitatPeer-v0" not in gym.envs.registry.env_specs:
    gym.register("HabitatPeer-v0", entry_point=OldGymEnv)


@registry.register_dataset(name="Peers-v0")
class NoDataset(Dataset):
    """The environment brings its own floor plans."""

    def __init__(self, config=None):
        self.episodes = []

    @classmethod
    def get_scenes_to_load(cls, config):
        # one name for each environment, else habitat warns
        return [f"plan{i}" for i in range(peers.NUM_ENVS)]


class PeersNet(Net):
    """PointNavResNetNet with the encoders of peers.py in the place of its own."""

    def __init__(self, action_space, hidden_size):
        super().__init__()
        # Gymnasium's space; habitat-baselines has old gym's
        self.encoder = peers.ObservationEncoder(peers.make_env().observation_space)
        self.prev_action_embedding = nn.Embedding(action_space.n + 1, 32)
        in_features = self.encoder.out_features + 32
        lstm = {"rnn_type": "LSTM", "num_layers": 1}
        self.state_encoder = build_rnn_state_encoder(in_features, hidden_size, **lstm)
        self.hidden_size = hidden_size
        self.train()

    is_blind = False
    output_size = property(lambda self: self.hidden_size)
    recurrent_hidden_size = property(lambda self: self.hidden_size)
    perception_embedding_size = property(lambda self: self.hidden_size)
    num_recurrent_layers = property(lambda self: self.state_encoder.num_recurrent_layers)

    def forward(
        self, observations, rnn_hidden_states, prev_actions, masks, rnn_build_seq_info=None
    ):
        prev_actions = prev_actions.squeeze(-1)
        tokens = torch.where(masks.view(-1), prev_actions + 1, torch.zeros_like(prev_actions))
        x = torch.cat([self.encoder(observations), self.prev_action_embedding(tokens)], dim=1)
        inputs = rnn_hidden_states, masks, rnn_build_seq_info
        x, rnn_hidden_states = self.state_encoder(x, *inputs)
        return x, rnn_hidden_states, {"rnn_output": x}


@baseline_registry.register_policy
class PeersPolicy(NetPolicy):
    """What habitat-baselines makes of its configuration."""

    @classmethod
    def from_config(cls, config, observation_space, action_space, **_):
        settings = config.habitat_baselines.rl
        net = PeersNet(action_space, settings.ppo.hidden_size)
        configs = {
            "policy_config": settings.policy.main_agent,
            "aux_loss_config": settings.auxiliary_losses,
        }
        return cls(net, action_space, **configs)


def train(steps, folder, trainer, threads, double_buffered=False):
    """Run the trainer as habitat_baselines.run does; returns (environment steps so far, time) at
    each update's end."""
    from habitat_baselines.config.default import get_config
    from habitat_baselines.rl.ppo.ppo_trainer import PPOTrainer
    from habitat_baselines.rl.ver.ver_rollout_storage import VERRolloutStorage
    from habitat_baselines.rl.ver.ver_trainer import VERTrainer

    text = CONFIG % {
        "trainer": trainer,
        "steps": steps,
        "num_envs": peers.NUM_ENVS,
        "num_steps": peers.NUM_STEPS,
        "epochs": peers.EPOCHS,
        "minibatches": peers.MINIBATCHES,
        "hidden": peers.HIDDEN,
        "lr": peers.LEARNING_RATE,
        "double_buffered": double_buffered,
    }
    Path(folder, "peers_config.yaml").write_text(text)
    config = get_config("peers_config.yaml", [], folder)
    random.seed(config.habitat.seed)
    np.random.seed(config.habitat.seed)
    torch.manual_seed(config.habitat.seed)
    torch.set_num_threads(threads)
    # one import for all workers
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["peer_habitat"])
    marks = []
    collected = [0]
    cls = {"ver": VERTrainer, "ddppo": PPOTrainer}[trainer]
    after_rollout = VERRolloutStorage.after_rollout
    update_agent = cls._update_agent

    def count(rollouts):  # called by VER's main process at the end of each rollout
        collected[0] += int(rollouts.num_steps_collected.item())
        after_rollout(rollouts)

    def mark(self):
        collected[0] += peers.ROLLOUT_STEPS * (trainer == "ddppo")
        steps = collected[0]
        losses = update_agent(self)
        marks.append((steps, time.perf_counter()))
        return losses

    VERRolloutStorage.after_rollout = count
    cls._update_agent = mark
    baseline_registry.get_trainer(trainer)(config).train()
    return marks
