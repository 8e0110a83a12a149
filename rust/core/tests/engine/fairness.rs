//! Who is served next, between tenants.

use chairlift_core::{Engine, EngineConfig, Fairness, Request, RequestId, Results, Slot};

struct Shop {
    engine: Engine,
    arena: Vec<i32>,
}

impl Shop {
    fn new(weights: &[(&str, f64)], rows: u32) -> Self {
        let weights = weights.iter().map(|&(name, weight)| (name.to_owned(), weight)).collect();
        let engine = Engine::new(EngineConfig {
            page_size: 4,
            match_unit: 0,
            num_blocks: 64,
            max_requests_per_batch: rows,
            max_batch_tokens: 64,
            fairness: Fairness::Tenants(weights),
            ..EngineConfig::default()
        })
        .unwrap();
        let arena = vec![0; engine.arena_capacity()];
        Self { engine, arena }
    }

    fn submit(&self, tenant: &str, prompt: usize, max_new_tokens: i64) -> RequestId {
        let request =
            Request { prompt: vec![7; prompt], max_new_tokens, tenant: tenant.into(), ..Request::default() };
        self.engine.inbox().submit(request).unwrap()
    }

    /// Runs until so many requests have ended: which.
    fn serve(&mut self, count: usize) -> Vec<RequestId> {
        let mut ended = Vec::new();
        while ended.len() < count {
            let step = self.engine.advance(None, Some((Slot::A, &mut self.arena)), 0.0).unwrap().unwrap();
            let tokens = vec![1; step.shape.sampled];
            let results = Results { slot: Slot::A, tokens: &tokens, logprobs: &[] };
            self.engine.advance(Some(results), None, 0.0).unwrap();
            self.engine.check_integrity().unwrap();
            ended.extend(std::iter::from_fn(|| self.engine.outbox().take_next()).map(|event| event.request));
        }
        ended
    }
}

#[test]
fn a_flood_of_one_tenant_does_not_keep_another_waiting() {
    let mut shop = Shop::new(&[], 1);
    let flood: Vec<_> = (0..100).map(|_| shop.submit("flood", 4, 4)).collect();
    assert_eq!(shop.serve(1), [flood[0]]);
    let other = shop.submit("other", 4, 4);
    assert!(shop.serve(2).contains(&other), "the other is next, or after the one that was taken already");
}

#[test]
fn tenants_are_served_by_their_weights() {
    let mut shop = Shop::new(&[("light", 1.0), ("heavy", 3.0)], 1);
    let light: Vec<_> = (0..60).map(|_| shop.submit("light", 4, 4)).collect();
    for _ in 0..60 {
        shop.submit("heavy", 4, 4);
    }
    let served = shop.serve(40);
    let of_light = served.iter().filter(|request| light.contains(request)).count();
    assert_eq!(of_light, 10, "a quarter of the work");
}

#[test]
fn a_long_request_counts_for_as_many_short_ones() {
    let mut shop = Shop::new(&[], 1);
    let long: Vec<_> = (0..10).map(|_| shop.submit("long", 30, 20)).collect();
    for _ in 0..100 {
        shop.submit("short", 4, 3);
    }
    // 30 + 2 x 20 tokens beside 4 + 2 x 3.
    let served = shop.serve(40);
    assert_eq!(served.iter().filter(|request| long.contains(request)).count(), 5);
}

#[test]
fn whoever_was_away_has_no_claim_from_that_time() {
    let mut shop = Shop::new(&[], 1);
    for _ in 0..30 {
        shop.submit("busy", 4, 4);
    }
    shop.serve(20);
    let back: Vec<_> = (0..20).map(|_| shop.submit("back", 4, 4)).collect();
    let served = shop.serve(12);
    let of_back = served.iter().filter(|request| back.contains(request)).count();
    assert!((5..=7).contains(&of_back), "they take turns from now on: {of_back} of 12");
}

#[test]
fn a_tenants_own_requests_go_by_priority_and_no_tenant_gains_by_it() {
    let mut shop = Shop::new(&[], 1);
    let first = shop.submit("a", 4, 4);
    let urgent = shop
        .engine
        .inbox()
        .submit(Request {
            prompt: vec![7; 4],
            max_new_tokens: 4,
            tenant: "a".into(),
            priority: 9,
            ..Request::default()
        })
        .unwrap();
    let other = shop.submit("b", 4, 4);
    assert_eq!(shop.serve(3), [urgent, other, first]);
}

#[test]
fn tenants_that_come_once_and_never_again_are_forgotten() {
    let mut shop = Shop::new(&[("resident", 1000.0)], 8);
    // Of whom something is always here, and who was served least.
    shop.submit("resident", 4, 200);
    for tenant in 0..5000 {
        shop.submit(&format!("user {tenant}"), 4, 1);
        shop.serve(1);
        if tenant % 150 == 0 {
            shop.submit("resident", 4, 200);
        }
    }
    let text = format!("{:?}", shop.engine);
    assert!(text.matches("user ").count() < 4000, "{}", text.matches("user ").count());
}

#[test]
fn weights_out_of_bounds_are_refused() {
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e4] {
        let fairness = Fairness::Tenants(vec![("a".into(), weight)]);
        let refused = Engine::new(EngineConfig { fairness, ..EngineConfig::default() });
        assert!(refused.unwrap_err().to_string().contains("with weights from 0.001 to 1000"));
    }
}
