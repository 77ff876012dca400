{{/* TLS between pods: each makes itself a certificate before it starts, by a CA that no container of
     its own sees after that. */}}

{{- define "topwork.tls" -}}
{{- if and (eq .Values.mode "rayservice") .Values.ray.tlsSecret }}on{{- end }}
{{- end }}

{{- define "topwork.tlsVolumes" -}}
{{- if include "topwork.tls" . }}
- name: tls-ca
  secret:
    secretName: {{ .Values.ray.tlsSecret | quote }}
- name: tls
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- end }}
{{- end }}

{{- define "topwork.tlsMount" -}}
{{- if include "topwork.tls" . }}
- name: tls
  mountPath: /etc/topwork/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* Its folder is called by its address. Workers find the head by the name of its service. */}}
{{- define "topwork.tlsInit" -}}
{{- if include "topwork.tls" . }}
- name: certificate
  image: {{ include "topwork.image" (dict "root" . "flavour" "router") | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [topwork, certificates, /etc/topwork/tls]
  args:
    - $(POD_IP),$(CLUSTER)-head-svc,$(CLUSTER)-head-svc.$(NAMESPACE).svc,$(CLUSTER)-head-svc.$(NAMESPACE).svc.cluster.local
    - --ca=/etc/topwork/tls-ca
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - name: NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: CLUSTER
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['ray.io/cluster']"}}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 256Mi}
  volumeMounts:
    - name: tls-ca
      mountPath: /etc/topwork/tls-ca
      readOnly: true
    - name: tls
      mountPath: /etc/topwork/tls
{{- end }}
{{- end }}

{{/* What `topwork environment --tls` says. */}}
{{- define "topwork.tlsEnvironment" -}}
{{- if include "topwork.tls" . }}
- name: TOPWORK_POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: TOPWORK_CLUSTER_TLS
  value: /etc/topwork/tls/$(TOPWORK_POD_IP)
- name: RAY_USE_TLS
  value: "1"
- name: RAY_TLS_CA_CERT
  value: /etc/topwork/tls/$(TOPWORK_POD_IP)/ca.pem
- name: RAY_TLS_SERVER_CERT
  value: /etc/topwork/tls/$(TOPWORK_POD_IP)/node.pem
- name: RAY_TLS_SERVER_KEY
  value: /etc/topwork/tls/$(TOPWORK_POD_IP)/node.key
- name: RAY_enable_metrics_collection
  value: "0"
- name: DASHBOARD_METRIC_PORT
  value: "-1"
- name: AUTOSCALER_METRIC_PORT
  value: "-1"
{{- end }}
{{- end }}
