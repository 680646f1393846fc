"""Contrastive training at any batch size: losses over all ranks' rows, and GradientCache in the memory of a chunk."""

from isograd.losses.contrastive.grad_cache import AuxiliaryLoss as AuxiliaryLoss
from isograd.losses.contrastive.grad_cache import GradientCache as GradientCache
from isograd.losses.contrastive.losses import FullBatchLoss as FullBatchLoss
from isograd.losses.contrastive.losses import InfoNCE as InfoNCE
from isograd.losses.contrastive.losses import NegativesScope as NegativesScope
from isograd.losses.contrastive.losses import SigLIP as SigLIP
from isograd.losses.contrastive.losses import negatives_scope as negatives_scope
from isograd.losses.contrastive.losses import row_ids as row_ids
from isograd.losses.contrastive.pool import pool as pool
