"""Contrastive training at any batch size: losses over all ranks' rows, and GradCache, in the memory of one chunk."""

from isograd.contrastive.grad_cache import GradCache as GradCache
from isograd.contrastive.grad_cache import Second as Second
from isograd.contrastive.losses import Across as Across
from isograd.contrastive.losses import InfoNCE as InfoNCE
from isograd.contrastive.losses import OfAll as OfAll
from isograd.contrastive.losses import SigLIP as SigLIP
from isograd.contrastive.losses import across as across
from isograd.contrastive.losses import same_rows as same_rows
from isograd.contrastive.pool import pool as pool
