"""The texts of errors of comm and engine."""

TEXTS = """
IG201: a collective over {axes!r} was called on a mesh that is bound to no world
  expected: a mesh made by Mesh(layout) inside a running world
  fix:      use isograd.launch(fn, nproc) or torchrun; Mesh.unbound is for looking only
IG202: the sizes given for dim {dim} over {axes!r} do not describe this tensor
IG203: dim {dim} of length {total} cannot be cut evenly over {axes!r}
  seen:     shape {shape} over {size} ranks
  expected: a multiple of {size}, or explicit sizes
  fix:      pass sizes=isograd.comm.group.even_sizes({total}, {size})
IG204: all_to_all moves a cut between two different dimensions
IG206: simulated rank {rank} waits for a value of rank {sender} that nobody has sent
  seen:     a control message over {axes!r}, and no rank of that pipeline stage ran before
  expected: a rank of each pipeline stage in one fake world
  fix:      fake.FakeWorld().run with the program of a rank of each stage, or 'isograd rehearse'
IG207: a collective over {axes!r} after this rank's connections were closed: {closed}
  fix:      on all ranks make ig.Mesh and the model anew, or end the processes; resume from the last checkpoint
IG208: ranks that torchrun has started did not come
  expected: {size} ranks
  fix:      look at their output on the other machines
IG210: a machine shows its ranks fewer cards than it has ranks
  expected: a card for each rank, and no card for two
IG211: some ranks would compute on cards, and others on the CPU
  expected: the same on all ranks
IG212: the CPU is asked for in a world that was joined for cards
  expected: the device that the world was joined for
  fix:      give device='cpu' to launch, or join a process group of gloo
IG213: another rank has closed its connections
  expected: every rank to come to the same collectives
  fix:      see the error of that rank; end the processes, and resume from the last checkpoint
IG214: this rank gave up a step while others wait for it inside a layer; its connections are closed
  expected: every rank to give up the step, or none
  fix:      end the processes, and resume from the last checkpoint
IG215: ranks wait for each other, and none of them would ever go on; their connections are closed
  expected: every rank of a group to call the same layers and collectives, with tensors of the same shapes
  fix:      see what each of them waits for; let them do the same, and resume from the last checkpoint
IG251: the function or its arguments cannot be sent to the ranks
  expected: a function defined at the top level of a module, and arguments that can be pickled
  fix:      move the function out of the function or class it is defined in; pass tensors and plain data
IG254: no answer within {timeout} s from ranks {silent}
  seen:     ranks {finished} finished
  expected: all ranks to reach the same collectives in the same order
  fix:      look for a collective that only some ranks call, or for different numbers of steps per rank
IG260: the command that started the ranks was killed, and its ranks exit
  expected: a command that lives as long as its ranks; Ctrl-C, SIGTERM and STOP end both
IG500: the Engine takes a model, a mesh, and a function that makes an optimizer of the parameters it is given
  fix:      ig.Engine(model, ig.Mesh("dp2 zero1"), lambda ps: torch.optim.AdamW(ps, lr=3e-4))
IG501: the model has no trainable parameter
  expected: at least one with requires_grad=True
IG502: {differing} differ between ranks that share the axes {axes!r}
  expected: the same names, shapes, cuts, dtypes and trainable parameters on all of them
  fix:      build the same model with the same config and freeze the same parameters on every rank
IG503: {count} parameters have neither memory nor values
  expected: isograd's layers, which know their values, or Engine(..., weights='folder of safetensors')
IG504: the optimizer does not own exactly the trainable parameters
  seen:     not owned: {missing}; owned twice: {twice}; tensors it was not given: {foreign}
  expected: each shard that the function was called with, once
  fix:      lambda ps: torch.optim.AdamW(ps, lr=3e-4); freeze other parameters before making the Engine
IG505: parameter groups and parameters do not match
  seen:     patterns that match nothing: {empty}; parameters that no pattern matches: {lost}
  expected: every pattern to match a parameter and every parameter to match a pattern
  fix:      end with a '*' pattern; the names are {names}
IG506: replicated parameters start with different values on ranks of {axes!r}
  expected: equal bytes on every rank that holds a copy
  fix:      build the model from the same seed on all ranks (isograd layers do), or load the same weights
IG507: parameter {name!r} already carries a gradient
  seen:     a backward ran before the Engine was made
  expected: gradients that the engine has weighed itself
  fix:      call model.zero_grad() before making the Engine
IG510: a gradient of {name!r} arrived outside engine.backward, and was left out
  seen:     loss.backward() or torch.autograd.backward on parameters that the Engine made at {made_at} holds
  expected: engine.backward(loss, weight=...), which knows the weight of the loss
  fix:      requires_grad_(False) on this model while another engine's loss passes through it
IG511: step() was called inside no_sync()
  expected: step() after the with-block
  fix:      move engine.step() out of 'with engine.no_sync():'
IG512: the step has no weight: no rank contributed a token
  seen:     weights per data rank: {weights}
  expected: a positive sum of weights over the data ranks and backwards of a step
  fix:      call engine.backward(loss, weight=count) at least once before engine.step()
IG513: {name} does not need a gradient
  seen:     requires_grad is False: detached, computed under no_grad, or independent of every parameter
  expected: a value computed by the model with gradients enabled
  fix:      a term of which a rank has nothing has a weight of 0; one that is only shown has a coefficient of 0
IG514: the value of {name} is not one real number
  expected: a scalar tensor: the mean over this rank's tokens (rows, ...), with their number as its weight
IG515: the weight of {name} is negative, NaN, infinite, or not one number
  expected: the number of tokens (sequences, rows, ...) that it is the mean of; 0 for a rank without any
IG516: ranks of one {axes} group were given different {things}
  expected: the same sequences on every rank of a tp, cp or pp group: only dp ranks see different ones
  fix:      index the data by mesh.index('dp'), not by the global rank
IG517: the model was changed after the Engine was made
  seen:     added, removed, moved, cast, frozen or not, edited while sharded, or given a hook on its gradient: {names}
  expected: the parameters the engine shards and reduces, in the same memory
  fix:      change the model first (to(dtype), freeze, add layers), then make a new Engine
IG519: this model is not cut into stages, which {layout!r} needs
  expected: isograd's Transformer, or ig.pipeline.Stages([...], mesh, loss=...)
IG520: reproducible sums are not built for pipelines
  expected: reproducible=False, or a layout without pp
IG521: engine.backward cannot run a pipeline
  expected: engine.train_step(batch, micro_batches=k), which runs every layout
IG522: an option of the Engine that is none, or that is not the same on all ranks
  expected: clip: None, or a number from 0; bucket_mb: a number above 0; loss_scale: an ig.LossScale; alike on all ranks
IG523: a rank of the pipeline has nothing to train
  expected: at least one on each
  fix:      give split= so that each rank has a layer that trains, or use fewer pp ranks
IG524: a rank without labels has a loss that is not finite, and cannot leave out its backward
  seen:     loss {loss} with weight 0 under {layout!r}
  expected: a loss of 0 over no label: other ranks take part in its backward (cp, ep, ZeRO 3)
  fix:      divide by the number of labels, but at least by 1: loss = losses.sum() / max(1, labels)
IG526: buffers have no memory, and their values are not known
  expected: buffers with values; only parameters may be on the meta device
  fix:      build the model inside 'with ig.empty_parameters():' instead of torch.device('meta')
IG527: offload needs row shards
  expected: zero1, zero2 or zero3: at zero0 every rank steps whole parameters where they are
IG528: patterns of whole matrices match nothing
  seen:     matrices={patterns}; without a matrix: {idle}
  expected: shell-style patterns of names of trainable matrices, such as {examples}
IG529: matrices that were to stay whole are cut over more than tp
  expected: matrices of which the tp ranks have all rows and columns
  fix:      a layout without these axes, AdamW, or matrices= patterns that leave these out
IG530: a group was added to a ChainedOptimizer, and none of its members would step it
  expected: groups given to one of the members before they are chained
IG531: {kind} needs whole matrices and was given pieces
  seen:     {name!r}, cut {how}
  expected: matrices that one data rank owns whole
  fix:      Engine(..., matrices=['blocks.*']) and ig.ChainedOptimizer({kind}(shards.matrices), AdamW(shards.rest)),
            where the optimizer is made
IG533: DataParallel was given options that it does not have
  expected: of DDP's, beside those that change nothing here: {options}
  fix:      leave them out; mixed precision: autocast or model.to(torch.bfloat16); other groups: ig.Engine
IG534: device_ids or output_device name another device than the module's
  seen:     device_ids={devices}, output_device={output}; the module lies on {home}
  expected: nothing, or the one device that the module lies on
  fix:      module.to(device) first, and one process for each device
IG535: some losses of a step have a weight, and some have none
  expected: a weight for each loss, or for none, on all ranks: engine.backward(loss, weight=n), or model.weigh(loss, n)
  fix:      give each its weight; 0 for a batch in which nothing counts
IG536: weigh needs the loss that it weighs
  expected: loss = model.weigh(loss, count); loss.backward()
IG537: a part of the gradients was cleared between two backwards under no_sync
  seen:     zero_grad of an optimizer that has some of the parameters, before their sum was reduced
  expected: gradients cleared after a backward outside no_sync, or all of them
IG538: one backward has two weights
  expected: one call of weigh for each backward, of the whole loss
  fix:      add the losses first and weigh their sum, or go backward from each
IG539: DataParallel was given a model of which each rank has a part
  expected: a model that is whole on every rank
  fix:      ig.Engine(model, mesh, ...), which knows tp and ep; or build the model on a mesh of dp ranks
IG541: complex parameters are not trained: sums and optimizers here take real numbers
  expected: real parameters
  fix:      store torch.view_as_real(p) as the parameter and use torch.view_as_complex in forward; or freeze it
IG543: {kind} evaluates the loss several times in a step, which the engine cannot
  seen:     {kind}.step(closure)
  expected: an optimizer whose step takes the gradients that are there
  fix:      use another optimizer; torch.optim.LBFGS needs a loop of its own, without an Engine
IG544: sparse gradients of embeddings are not reduced
  expected: dense gradients, of which each rank keeps its rows (from zero1 on)
  fix:      set sparse=False (module.sparse = False before the first forward), or freeze the weight
IG545: a parameter has a hook of its own for accumulated gradients
  seen:     register_post_accumulate_grad_hook on {names}
  expected: gradients that nobody changes or takes away before they are summed over ranks
  fix:      remove the hook; engine.grads() shows gradients, and engine.step() steps the optimizer
IG546: a hook before the optimizer's step would be given rows of gradients
  seen:     register_step_pre_hook on an optimizer whose gradients are row shards
  expected: whole gradients for what clips, normalises or looks at them
  fix:      Engine(..., clip=...) clips; engine.grads() shows whole gradients; remove the hook, or use zero0
IG547: ranks of one tp group have different losses of one batch
  seen:     sums of losses {losses} on ranks {peers}
  expected: the whole loss on every rank of a tp group, computed in the same way
  fix:      scale, mask or add to the loss alike on all ranks of a tp group
IG548: the optimizers of ranks that train one model are set differently
  seen:     lr, decay or another number of a group, clip, check_sums() or the loss scale on ranks {unlike} is not that
            of rank {first}
  expected: equal groups on all ranks, which step copies or rows of the same parameters; on pp ranks, equal settings of
            groups that the optimizer was made with alike
  fix:      drive schedules by what all ranks share: stats.loss of engine.step(), not a rank's own loss; give groups of
            other schedules a "name" each
IG549: a loss counts by its rows, and they are not known
  seen:     a backward of a loss that no output of model(...) is a part of, without weigh
  expected: the loss of what model(...) returned, not model.module or a method of it
  fix:      call model(...); or loss = model.weigh(loss, rows) (accelerate: backward(loss, weight=rows))
IG550: the step is refused on all ranks: {failed} failed in it
  expected: every backward of a step to end well on every rank
  fix:      engine.discard() on every rank, where none has refused the step yet: those in engine.step() wait for it
IG551: the gradient of {found!r} belongs to a step that is not finished, and was used by hand
  seen:     {func} on its .grad: clip_grad_norm_, loss.backward(), optimizer.step(), or zero_grad in place
  expected: Engine(clip=...), engine.backward(loss, weight=...), engine.step(), engine.grads() to look
  fix:      to drop what the step has gathered so far, call engine.discard() on every rank
IG552: the step is {state}
  seen:     a backward inside another one, or a step inside a backward
  expected: the step to be {allowed}
IG553: {whose} were cleared or replaced by hand in the middle of a step
  expected: engine.discard(), which drops the step on every rank
IG554: data ranks ran different numbers of backwards that reduce gradients
  expected: as many synced backwards on every data rank
  fix:      empty batches with weight=0, engine.no_sync() but for the last, or Engine(..., overlap=False);
            engine.discard() on all ranks, if a backward failed on one
IG555: some ranks {does} while others do not
  seen:     ranks {found} do; another call of the engine on the others
  expected: all ranks to do it, between the same two steps: each has its own rows
  fix:      take the call out of 'if rank == 0:'; nothing of the step is left, on any rank
IG556: the optimizer of an Engine was stepped by hand
  expected: engine.step(), which sums the gradients of all ranks, clips and steps
IG557: the model is wrapped in something that reduces gradients itself
  expected: the bare module: an engine reduces, shards and gathers for itself
  fix:      give the module inside: model.module for DDP; no fully_shard: take zero3; no parallelize_module: take tp
IG558: the step was discarded by another rank
  seen:     engine.discard() on ranks {ranks}, engine.step() or engine.grads() here
  expected: all ranks to discard a step, or none
  fix:      nothing of the step is left, on any rank: continue with the next batch
IG559: an optimizer raised, or has stepped on some ranks only: parameters may have half a step, and copies may differ
  expected: optimizers that step on every rank, or on none; exceptions that are caught where they arise
  fix:      load a checkpoint on all ranks (CheckpointManager.load, load_state); or load weights and make a new
            Engine; or take them as they are, with ig.Engine(..., accept_weights=True)
IG560: the term {name!r} is not (value, weight) or (value, weight, coefficient)
  expected: the mean, the number of things it is the mean of, and a finite number that the mean is multiplied with in
            the loss (1 if left out)
  fix:      Terms({name}=(loss, tokens)) or Terms({name}=(loss, sequences, 0.01))
IG561: ranks announced different terms for one step
  expected: the same names on every rank; a weight of 0 where a rank has nothing of a term
IG562: the term {name!r} was not announced for this step{hint}
  expected: of those announced: {known}
  fix:      engine.begin(..., {name}=...) on every rank, with its weight over the whole step
IG563: the weights of the step's terms are not those that were announced
  expected: backwards whose weights add up to what engine.begin (or the model's term_weights) announced
  fix:      announce the sum over all micro-batches of the step, and run all of them
IG564: the weights of this step's terms were not announced before its first backward
  expected: the weight of each term over the whole step, which each backward is divided by
  fix:      engine.begin(name=weight, ...) on every rank before the first backward, or engine.train_step
IG565: one step or evaluation has terms and losses with one weight
  expected: one kind of backward in a step: the second kind is divided at the step, by one weight
  fix:      engine.backward(ig.Terms(name=(loss, weight))), after engine.begin(name=..., ...)
IG566: engine.begin in the middle of a step, or not on all ranks
  seen:     a step that has begun, or has gathered gradients, and has not ended
  expected: engine.begin once, on every rank, before the first backward of a step; 0 where there is nothing of a term
  fix:      end the step before by engine.step(), or by engine.discard() on all ranks; then call engine.begin on all
            ranks
IG567: {value} is in half precision
  expected: float32 or float64: a weight has more digits than half precision
  fix:      compute the loss in float32, for example from logits.float()
IG568: DataParallel takes a loss with one weight
  expected: one mean; `.grad` is divided by one weight after the backward
  fix:      ig.Engine, whose backward takes ig.Terms; or add the losses if they are means of the same things
IG569: DataParallel was given a model with experts
  seen:     {layers} layers that count over a step which tokens their experts get
  expected: a model without experts: their counts are used once, when a step is taken
  fix:      ig.Engine(model, mesh, ...), which also divides each term of the loss by its own weight
IG571: an exception on rank {ranks} ended a ZeRO 3 gather of the data ranks
  expected: every data rank to call the same blocks of the model
  fix:      see the error of that rank; a program that catches it catches this one, too, on all ranks
IG572: data ranks use different parts of the model at the same time
  expected: the same blocks in the same order on every data rank, at ZeRO 3: each call gathers parameters
  fix:      choose skipped blocks (LayerDrop) with the same random numbers on all ranks; run as many forwards and
            backwards on each, with weight 0 where a rank has no data; or use zero2
IG573: two parameters share memory, which cannot be sharded
  expected: one nn.Parameter under two names (a tie), or memory of their own
  fix:      assign the same nn.Parameter to both modules, or clone one of the two; contiguous ones train at zero2
IG574: {use} of a ZeRO 3 model whose parameters are not gathered
  seen:     parameters that are NaN outside of the model's forward
  expected: with engine.full_parameters(): on all ranks, around it
  fix:      put the call inside engine.full_parameters(); to save a run, use isograd.checkpoint, which gathers nothing
IG575: {shapes} are not tensors of one shape
  expected: one number in each for every token (or sequence)
  fix:      cut all of them as the tokens are cut, by rows and by places; expand what is the same for many
IG578: the Engine made at {old} has no model any more: the one made at {new} has taken it over
  fix:      call the new Engine; or give it a model of its own
IG580: a message or a sum of this step was changed
  expected: what the ranks have sent, and its sums, up to rounding
  fix:      engine.discard() on all ranks, and the step again; if it happens again, the rank named is faulty
IG581: two ranks computed different gradients of one micro-batch: {spelled} computed wrongly
  expected: the same bits from equal parameters and equal rows
  fix:      engine.discard() on all ranks, and the step again; if it happens again, leave that machine out, and resume
            from a checkpoint before
IG582: micro-batches of this run cannot be computed again by another rank
  expected: dp with zero0 to zero2, tp or cp; one loss; no random numbers of torch's in the forward
  fix:      safety.replay_every: 0
IG583: what a rank keeps has changed between two steps
  expected: the bits that the step before has left
  fix:      engine.discard() on all ranks, restore, and the step again, or resume; a second time: faulty memory
IG584: these gradients are of a step that has ended
  expected: engine.grads() after the last backward, read before engine.step() or engine.discard()
  fix:      look them up before; a clone of one may be kept
IG586: the last step, whose numbers are read only now, was refused
  expected: numbers of a step that all ranks can take
  fix:      it has changed no parameter, and what was called now is not done, either: go on with the next batch, or call
            again; engine.step() in place of step_async() refuses a step where it is wrong
IG587: a card could not take the step: gradients' factor is no usual number of fp32
  expected: weights that are numbers of tokens or rows
  fix:      engine.step() in place of step_async(): the host takes such a step
IG585: engine.optimizer.load_state_dict was given a state that is not this rank's part
  expected: what engine.optimizer.state_dict() has returned on this rank under this layout: its rows, in its own file
  fix:      CheckpointManager(folder, engine): its save and load take all ranks' rows, under any layout
"""
